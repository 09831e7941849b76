"""The launches of what reads weights or quantises activations; see ahead_cases.py."""

from collections.abc import Iterator
from typing import TypeAlias

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_triton import embedding, hyper, linear, moe, quantize
from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.planes import Planes, take_apart

Named: TypeAlias = Iterator[tuple[str, Launch]]

_ROWS = 4


def _of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes(*shape: int) -> torch.Tensor:
    return _of(*shape, dtype=torch.uint8)


_FORMS = {
    "bfloat16": "bfloat16",
    "fp8_blocks": "fp8_blocks, float8_e4m3fn",
    "nvfp4": "nvfp4, float8_e4m3fn scales",
    **{name: name for name in BLOCK_BYTES if name.startswith("gguf")},
}
"""Formats to how the launches name them: tests look for float8, which gfx942 has to widen bit by bit."""


def planes_of(rows: int, columns: int) -> Iterator[tuple[str, Planes]]:
    """The planes of a weight of these sizes in every format, by its name in _FORMS."""
    shape, dense = (rows, columns), QuantizedTensor.from_dense(_of(rows, columns, dtype=torch.bfloat16), "a weight")
    for name, form in _FORMS.items():
        if name == "bfloat16":
            yield form, take_apart(dense)
        elif name == "nvfp4":  # whose rows are looked at before they are taken apart
            scales = _of(rows, columns // 16, dtype=torch.float8_e4m3fn)
            nibbles, units = _bytes(rows, columns // 2), _of(rows, 1)
            yield form, Planes(name, 16, shape, nibbles, scales=scales, units=units, unit=columns)
        else:
            blocks = _bytes(rows, columns // BLOCK_ELEMENTS[name] * BLOCK_BYTES[name])
            yield form, take_apart(QuantizedTensor(name, shape, {"blocks": blocks}, "a weight"))


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
