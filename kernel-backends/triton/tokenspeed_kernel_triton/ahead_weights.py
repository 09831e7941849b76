"""The launches of what reads weights or quantises activations; see ahead_cases.py."""

from collections.abc import Iterator
from typing import TypeAlias

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_triton import embedding, hyper, linear, moe, quantize
from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.planes import Planes

Named: TypeAlias = Iterator[tuple[str, Launch]]

_ROWS = 4


def _of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes(*shape: int) -> torch.Tensor:
    return _of(*shape, dtype=torch.uint8)


def planes_of(rows: int, columns: int) -> Iterator[tuple[str, Planes]]:
    """The planes of a weight of these sizes in every form that differs, by the name of a format with it."""
    shape, groups = (rows, columns), {size: (rows, columns // size) for size in (16, 32, 128)}
    eights = {size: _bytes(*groups[size]) for size in (16, 32)}
    nibbles, units = _bytes(rows, columns // 2), _of(rows, columns // 256)
    plain = {"elements": nibbles, "half": 16, "scales": _of(*groups[32])}
    yield "bfloat16", Planes("dense", 0, shape, _of(*shape, dtype=torch.bfloat16))
    yield (
        "fp8_blocks, float8_e4m3fn",
        Planes("eight", 128, shape, _of(*shape, dtype=torch.float8_e4m3fn), scales=_of(*groups[128])),
    )
    yield "gguf_q8_0", Planes("eight", 32, shape, _of(*shape, dtype=torch.int8), scales=_of(*groups[32]))
    yield "gguf_q4_0", Planes("quants", 32, shape, **plain, zero=8)
    yield "gguf_q4_1", Planes("quants", 32, shape, **plain, minima=_of(*groups[32]))
    high = {"high_bits": 1, "high": _bytes(rows, columns // 8)}
    yield "gguf_q5_0", Planes("quants", 32, shape, **plain, zero=16, **high)
    yield "gguf_q5_1", Planes("quants", 32, shape, **plain, minima=_of(*groups[32]), **high)
    yield "gguf_mxfp4", Planes("mxfp4", 32, shape, nibbles, scales=eights[32])
    in_row = groups[16]
    floats = _of(*in_row, dtype=torch.float8_e4m3fn)
    yield (
        "nvfp4, float8_e4m3fn scales",
        Planes("nvfp4", 16, shape, nibbles, scales=floats, units=_of(rows, 1), unit=columns),
    )
    above = {"elements": nibbles, "units": units, "unit": 256, "minimum_units": units}
    yield "gguf_q2_k", Planes("quants", 16, shape, half=16, scales=eights[16], minima=eights[16], **above)
    yield "gguf_q4_k", Planes("quants", 32, shape, half=32, scales=eights[32], minima=eights[32], **above)
    yield "gguf_q5_k", Planes("quants", 32, shape, half=32, scales=eights[32], minima=eights[32], **high, **above)
    signed = {"half": 16, "scales": _of(*in_row, dtype=torch.int8), "units": units, "unit": 256}
    yield "gguf_q3_k", Planes("quants", 16, shape, nibbles, zero=4, **signed)
    yield (
        "gguf_q6_k",
        Planes("quants", 16, shape, nibbles, zero=32, high_bits=2, high=_bytes(rows, columns // 4), **signed),
    )


def product_launches() -> Named:
    """A weight of 8192 outputs and 4096 inputs in every form, for one token and for a chunk; the heads of DeepSeek's
    latent attention; look-ups in a vocabulary of 151936, tokens of 8192 quantised."""
    for form, planes in planes_of(8192, 4096):
        for tokens in (1, 512):
            for rounded in (True, False):
                name = f"linear, {tokens} tokens, {form}{'' if rounded else ', float32 products'}"
                yield name, linear.linear_of(_of(tokens, 4096), planes, None, _of(1, tokens, 8192), rounded)
    yield "parts of a linear added", linear.add_splits_of(_of(8, 4, 4096), None, _of(4, 4096))
    for form, planes in planes_of(128 * 256, 512):
        if form in ("bfloat16", "fp8_blocks, float8_e4m3fn", "gguf_q4_k"):
            x, out = _of(_ROWS, 128, 512), _of(_ROWS, 128, 128)
            yield f"linear of each head, {form}, float32 products", linear.head_linear_of(x, planes, 128, out)
    ids, out = _of(_ROWS, dtype=torch.int32), _of(_ROWS, 8192)
    for form, size in BLOCK_BYTES.items():
        if form not in ("gguf_q8_0", "gguf_q6_k", "gguf_mxfp4", "nvfp4", "fp8_blocks"):
            continue
        blocks = _bytes(151936, 8192 // BLOCK_ELEMENTS[form] * size)
        weight = QuantizedTensor(form, (151936, 8192), {"blocks": blocks}, "an embedding")
        yield f"look-up, {form}", embedding.lookup_of(ids, weight, out)
    dense = QuantizedTensor.from_dense(_of(151936, 8192, dtype=torch.bfloat16), "an embedding")
    yield "look-up, bfloat16", embedding.lookup_of(ids, dense, out)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        small, scales = _of(_ROWS, 8192, dtype=dtype), _of(_ROWS, 64)
        yield f"128 elements quantised, {dtype}", quantize.rows_of(out, 128, small, scales)
        yield f"rows quantised, {dtype}", quantize.rows_of(out, 8192, small, scales[:, :1])
        yield f"128 × 128 elements restored, {dtype}", quantize.restore_of(small, scales, (128, 128), out)


def mixture_launches() -> Named:
    """256 experts of which 8 compute, in groups (DeepSeek-V3): hidden 7168, intermediate 2048; of 256 tokens."""
    tokens, experts, top_k = 256, 256, 8
    routing = Routing(experts=experts, top_k=top_k, scoring="sigmoid", corrected=True, groups=8, top_groups=4)
    ids, weights = _of(tokens, top_k, dtype=torch.int32), _of(tokens, top_k)
    yield "routing, groups", moe.route_of(routing, _of(experts), _of(tokens, experts), ids, weights)
    table = _of(129280, top_k, dtype=torch.int32)
    yield "routing by a table", moe.table_route_of(_of(tokens, experts), ids[:, 0], table, 1.5, ids, weights)
    order, starts = _of(tokens * top_k, dtype=torch.int32), _of(experts + 1, dtype=torch.int32)
    for form, planes in planes_of(experts * 7168, 2048):
        product = moe.Grouped(planes, None, experts, True)
        launch = product.launch(_of(tokens * top_k, 2048), weights, order, starts, _of(tokens * top_k, 7168), top_k)
        yield f"experts' products, {form}", launch
    yield "sum of a token's experts", moe.combine_of(_of(tokens * top_k, 7168), ids, _of(tokens, 7168))
    streams, x, z = _of(_ROWS, 4, 7168), _of(_ROWS, 7168), _of(_ROWS, 24)
    post, comb = _of(_ROWS, 4), _of(_ROWS, 4, 4)
    yield "streams begun", hyper.begin_of(x, streams)
    yield "streams mixed", hyper.mix_of(streams, z, z[0], z[0], 1e-6, 1e-6, 3, post, comb, x)
    yield "streams collapsed", hyper.mix_of(streams, post, z[0], z[0], 1e-6, 1e-6, 1, None, None, x)
    yield "an output spread", hyper.spread_of(x, post, comb, streams)
