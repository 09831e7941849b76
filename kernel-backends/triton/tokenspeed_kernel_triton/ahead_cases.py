"""The launches that are compiled ahead of time: each kernel in the sizes of well-known models."""

from collections.abc import Iterator
from typing import TypeAlias

import torch

from tokenspeed_kernel_triton import elementwise, paged_attention, rotary, sampling, verify
from tokenspeed_kernel_triton.ahead_entries import entry_launches
from tokenspeed_kernel_triton.ahead_recurrent_cases import recurrent_launches
from tokenspeed_kernel_triton.ahead_weights import mixture_launches, product_launches
from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.paged_attention import Reads

_PAGE, _PAGES, _ROWS = 64, 64, 4

_KINDS = (
    (torch.bfloat16, True, "torch.bfloat16"),
    (torch.float8_e4m3fn, True, "torch.float8_e4m3fn"),
    (torch.float8_e4m3fn, False, "torch.float8_e4m3fn, float32 products"),
    (torch.float16, False, "torch.float16"),
    (torch.float32, False, "torch.float32"),
)
"""Of a cache, whether its reader rounds queries and weights to bfloat16, and the name of both."""

Named: TypeAlias = Iterator[tuple[str, Launch]]


def _of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _paged(kv_heads: int, width: int, dtype: torch.dtype, fields: int) -> tuple[torch.Tensor, torch.Tensor]:
    cache = _of(_PAGES + 1, fields, kv_heads, _PAGE, width, dtype=dtype)
    return cache[:, 0], cache[:, -1]


def _whole_or_split(q: torch.Tensor, q_rope: torch.Tensor | None, reads: Reads, splits: int) -> Launch:
    cut = paged_attention.cut_of(q, reads)
    out, lse = paged_attention.split_workspace(q.shape[0], q.shape[1], splits, q.shape[2], q.device)
    return paged_attention.launch_of(q, q_rope, reads, cut, out, lse if splits > 1 else None, reads.sinks)


def grouped_launches() -> Named:
    """Grouped-query attention: 64 query heads, 8 KV heads of 128 (Llama 70B), 64 (gpt-oss) and 256 elements."""
    table, lens = _of(_ROWS, _PAGES, dtype=torch.int32), _of(_ROWS, dtype=torch.int32)
    starts = _of(_ROWS + 1, dtype=torch.int32)
    for width, window, sinks in ((128, 0, None), (64, 128, _of(64)), (256, 0, None)):
        for dtype, rounded, kind in _KINDS:
            k_cache, v_cache = _paged(8, width, dtype, 2)
            name = f"{width} elements, {kind}"
            decode = Reads(k_cache, v_cache, table, None, lens, 0.1, window, None, 0.0, rounded)
            extend = Reads(k_cache, v_cache, table, starts, lens, 0.1, window, sinks, 0.0, rounded, "extend")
            yield f"decode split, {name}", _whole_or_split(_of(_ROWS, 64, width), None, decode, 8)
            yield f"extend, {name}", _whole_or_split(_of(512, 64, width), None, extend, 1)
    for splits in (8, 64, 512):
        partials, lse = paged_attention.split_workspace(_ROWS, 64, splits, 128, torch.device("meta"))
        launch = paged_attention.merge_of(partials, lse, _of(64), _of(_ROWS, 64, 128), None)
        yield f"merge {splits} splits of 128 elements, sinks", launch


def latent_launches() -> Named:
    """Latent attention: 128 and 16 heads, a latent of 512 and a rotated key of 64 (DeepSeek)."""
    table, lens = _of(_ROWS, _PAGES, dtype=torch.int32), _of(_ROWS, dtype=torch.int32)
    starts = _of(_ROWS + 1, dtype=torch.int32)
    for heads in (128, 16):
        for dtype, rounded, kind in _KINDS:
            cache, _ = _paged(1, 576, dtype, 1)
            q = _of(_ROWS, heads, 576, dtype=torch.bfloat16 if rounded else torch.float32)
            chunk = _of(512, heads, 576, dtype=q.dtype)
            name = f"{heads} heads, {kind}"
            decode = Reads(cache, None, table, None, lens, 0.1, rounded=rounded, kind="latent")
            extend = Reads(cache, None, table, starts, lens, 0.1, rounded=rounded, kind="latent")
            yield f"MLA decode split, {name}", _whole_or_split(q[..., :512], q[..., 512:], decode, 8)
            yield f"MLA extend, {name}", _whole_or_split(chunk[..., :512], chunk[..., 512:], extend, 1)
    partials, lse = paged_attention.split_workspace(_ROWS, 128, 16, 512, torch.device("meta"))
    launch = paged_attention.merge_of(partials, lse, None, _of(_ROWS, 128, 512), _of(_ROWS, 128))
    yield "merge 16 splits of 512 elements, lse", launch


def row_launches() -> Named:
    """Norms, activations, rotary and the prologues: hidden 8192, 64 query heads on 8 of 128 elements, 128 latent."""
    x, weight = _of(_ROWS, 8192), _of(8192)
    yield "rms, 8192 elements", elementwise.norm_of(x, None, weight, 1e-5, x)
    yield "residual sum and rms, 8192 elements", elementwise.norm_of(x, x, weight, 1e-5, x)
    for kind in ("silu", "gelu_tanh", "clamped_swiglu", "clamped_silu"):
        yield f"{kind} of a gate", elementwise.gated_of(x[:, :4096], x[:, 4096:], x[:, 4096:], kind, 1.0, 7.0)
    yield "sigmoid gate", elementwise.sigmoid_gate_of(x, x, x)
    yield "sum", elementwise.add_of(x, x)
    yield "rows scaled", elementwise.scale_rows_of(x, weight, None, x)
    positions, slots, angles = _of(_ROWS, dtype=torch.int32), _of(_ROWS, dtype=torch.int64), _of(4096, 128)
    qkv = _of(_ROWS, 80, 128)
    yield "rotary", rotary.apply_of(qkv[:, :64], positions.unsqueeze(0), None, angles, True)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        k_cache, v_cache = _paged(8, 128, dtype, 2)
        heads = (qkv[:, :64], qkv[:, 64:72], qkv[:, 72:])
        norms = (angles[0], angles[0])
        yield (
            f"GQA prologue with head norms, {dtype}",
            rotary.gqa_prologue_of(*heads, positions, angles, *norms, 1e-6, k_cache, v_cache, slots),
        )
        cache, _ = _paged(1, 576, dtype, 1)
        yield (
            f"MLA prologue, {dtype}",
            rotary.mla_prologue_of(
                _of(_ROWS, 128, 192), _of(_ROWS, 576), positions, angles[:, :64], _of(512), 1e-6, cache, slots
            ),
        )


def sampling_launches() -> Named:
    """A vocabulary of 151936 (Qwen)."""
    logits, floats = _of(_ROWS, 151936), _of(_ROWS)
    ints, longs = _of(_ROWS, dtype=torch.int32), _of(_ROWS, dtype=torch.int64)
    yield "sample", sampling.sample_of(logits, floats, ints, floats, floats, longs, ints, ints, ints)
    counts, seen = _of(8, 151936, dtype=torch.int32), _of(8, 151936, dtype=torch.bool)
    yield "penalties", sampling.apply_penalties_of(logits, counts, seen, ints, floats, floats, floats)
    yield "token mask", sampling.apply_token_mask_of(logits, _of(8, 4748, dtype=torch.int32), ints)
    yield "log-probabilities", sampling.logprobs_of(logits, ints, 20, floats, counts[:, :20], logits[:, :20])
    yield "NaN in a row", sampling.has_nan_of(logits, seen[:, 0])
    tree = (ints, ints, _of(2, dtype=torch.int32), counts[:1, :8], counts[:1, :8], ints[:1])
    yield "walk along drawn tokens", verify.verify_of(ints, *tree)
    rules = (floats, ints, floats, floats, longs, ints, ints)
    yield "walk by rejection", verify.verify_proposals_of(logits, *rules, logits, *tree)


def launches() -> Named:
    """All of them, for the architecture of ``device.compiling_for``."""
    yield from grouped_launches()
    yield from latent_launches()
    yield from row_launches()
    yield from recurrent_launches()
    yield from sampling_launches()
    yield from product_launches()
    yield from mixture_launches()
    yield from entry_launches()
