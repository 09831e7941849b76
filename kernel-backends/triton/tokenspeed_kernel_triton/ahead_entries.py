"""The launches of sparse and compressed attention; see ahead_cases.py."""

from collections.abc import Iterator
from typing import TypeAlias

import torch

from tokenspeed_kernel.ops.kv_cache import row_dtype
from tokenspeed_kernel_triton import entries, expanded, paged_attention, sparse
from tokenspeed_kernel_triton.ahead_weights import planes_of
from tokenspeed_kernel_triton.loading import Launch

Named: TypeAlias = Iterator[tuple[str, Launch]]

_PAGE, _PAGES, _ROWS = 64, 64, 4


def _of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(width: int, dtype: torch.dtype) -> torch.Tensor:
    return _of(_PAGES + 1, 1, _PAGE, width, dtype=dtype)


def entry_launches() -> Named:
    """The indexer of DeepSeek-V3.2 (64 heads of 128, 2048 entries of latents), the entries of V4 (512 elements)."""
    table, lens = _of(_ROWS, _PAGES, dtype=torch.int32), _of(_ROWS, dtype=torch.int32)
    starts, slots = _of(_ROWS + 1, dtype=torch.int32), _of(_ROWS, dtype=torch.int64)
    angles, norm = _of(4096, 64), _of(512)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        yield f"entries written, {dtype}", entries.write_of(_of(_ROWS, 512), _cache(512, dtype), slots)
        index, heads, index_norm = _cache(128, dtype), _of(_ROWS, 64, 128), norm[:128]
        yield (
            f"indexer prologue, {dtype}",
            entries.index_prologue_of(heads, heads[:, 0], lens, angles, index_norm, index_norm, 1e-6, index, slots),
        )
        scores, selected = _of(_ROWS, _PAGES * _PAGE), _of(_ROWS, 2048, dtype=torch.int32)
        yield (
            f"indexer scores, {dtype}, float32 products",
            sparse.scores_of(heads, heads[..., 0].contiguous(), index, table, starts, lens, 1, 0, scores),
        )
        for stride, overlapping in ((4, True), (128, False)):
            tokens = _cache(1024 if overlapping else 512, row_dtype(dtype))
            bias = _of(stride, tokens.shape[3])
            yield (
                f"entry of {stride} tokens, {dtype}",
                entries.compress_of(
                    tokens,
                    tokens,
                    table,
                    starts,
                    lens,
                    bias,
                    norm,
                    1e-6,
                    angles,
                    _cache(512, dtype),
                    slots,
                    overlapping,
                ),
            )
        rounded = dtype.itemsize <= 2
        for query_heads, rope in ((128, 64), (64, 0)):
            cache, q = _cache(512 + rope, dtype), _of(_ROWS, query_heads, 512 + rope, dtype=row_dtype(dtype))
            parts, width = (q[..., :512], q[..., 512:]), paged_attention.split_workspace
            out, lse = width(_ROWS, query_heads, 8, 512, q.device)
            yield (
                f"selected entries, {query_heads} heads of 512 + {rope}, {dtype}",
                sparse.selected_of(*parts, cache, table, starts, selected, 0.1, out, lse, rounded),
            )
    yield "best of an indexer's scores", sparse.best_of(scores, starts, lens, 1, 0, selected)
    yield "sinks applied", entries.apply_sinks_of(_of(_ROWS, 128, 512), _of(_ROWS, 128), _of(128))
    partials, lse = paged_attention.split_workspace(_ROWS, 128, 8, 512, torch.device("meta"))
    yield (
        "merge 8 splits of ragged rows",
        paged_attention.merge_of(partials, lse, None, _of(_ROWS, 128, 512), None, starts),
    )
    yield from _expanded_launches()


def _expanded_launches() -> Named:
    """DeepSeek's prefill: 128 heads of 128 + 64 elements and values of 128, chunks of 512 tokens."""
    table, lens = _of(_ROWS, _PAGES, dtype=torch.int32), _of(_ROWS, dtype=torch.int32)
    starts, out, state = _of(_ROWS + 1, dtype=torch.int32), _of(512, 128, 128), _of(2, 512, 128)
    q = _of(512, 128, 192)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        cache, held = _cache(576, dtype), _of(_ROWS, 1024, 128 * 256, dtype=row_dtype(dtype))
        rounded = dtype.itemsize <= 2
        for form, planes in planes_of(128 * 256, 512):
            if form in ("bfloat16", "gguf_q4_k"):
                launch = expanded.expand_of(planes, cache, table, lens, 1024, held, rounded)
                yield f"keys and values expanded, {form}, {dtype}", launch
        read = (cache, table, starts, lens, 0.1, out, state, 1024)
        yield f"attention over what is expanded, {dtype}", expanded.attend_held_of(q, held, *read, False, rounded)
    for heads, width in ((128, 192), (8, 128)):
        keys, values = _of(4096, heads, width), _of(4096, heads, 128)
        yield (
            f"ragged rows, {heads} heads of {width}, float32 products",
            expanded.ragged_of(q[..., :width], keys, values, starts, starts, 0.1, out, state[0], True),
        )
