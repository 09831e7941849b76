"""Keys and values as the fused attention takes them: contiguous, in pages or side by side.

A layer's cache is a strided view of an arena in which the blocks of all layers and fields alternate. Where a block's
stride is a whole number of a layer's pages, the arena from the layer's first byte on *is* a contiguous cache, of which
the layer has every n-th page: the table is multiplied, nothing is copied. An operator takes at most 2^31 - 1 elements
that way. Else the pages of the rows are copied first, of as many rows at a time as MOST_COPIED lets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MOST_ELEMENTS = 2**31 - 1
"""Of a cache in one call."""

MOST_COPIED = 2**27
"""Elements of keys, and as many of values, that are copied at a time: 256 MB each in bfloat16."""


@dataclass(frozen=True)
class Paged:
    """k, v [pages, heads, g, D], contiguous, and the table int32 [B, n] of their pages."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor


def copied_bytes(_traits: object) -> int:
    """What copies take at a time, as the workspace of a kernel."""
    return 2 * 2 * MOST_COPIED


def passes(elements: Sequence[int]) -> Iterator[slice]:
    """Neighbouring rows whose elements [B] are at most MOST_COPIED together; at least one row each."""
    start = total = 0
    for row, count in enumerate(elements):
        if row > start and total + count > MOST_COPIED:
            yield slice(start, row)
            start, total = row, 0
        total += count
    yield slice(start, len(elements))


def used_pages(page_table: torch.Tensor, seq_lens: torch.Tensor, granularity: int) -> torch.Tensor:
    """The table with page 0 wherever a row has no position: those entries may hold anything."""
    first = torch.arange(page_table.shape[1], device=page_table.device, dtype=torch.int32) * granularity
    return torch.where(first < seq_lens.unsqueeze(1), page_table, 0)


def _whole_units(cache: torch.Tensor) -> int:
    """How many of a layer's pages lie from one of its blocks to the next; 0 where that is no whole number, or the page
    itself is not dense."""
    _, heads, granularity, width = cache.shape
    block, *within = cache.stride()
    unit = heads * granularity * width
    dense = within == [granularity * width, width, 1]
    return block // unit if dense and block % unit == 0 else 0


def _as_units(cache: torch.Tensor, factor: int) -> torch.Tensor:
    blocks, *page = cache.shape
    return cache.as_strided(
        (max(0, (blocks - 1) * factor + 1), *page), (cache.stride(0) // factor, *cache.stride()[1:])
    )


def in_place(k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor) -> Paged | None:
    """The caches [blocks, heads, g, D] without a copy, None where that cannot be. ``table``: of used_pages."""
    factor = _whole_units(k_cache)
    if factor == 0 or k_cache.stride() != v_cache.stride() or k_cache.shape != v_cache.shape:
        return None
    k, v = _as_units(k_cache, factor), _as_units(v_cache, factor)
    if k.numel() > MOST_ELEMENTS:
        return None
    return Paged(k, v, (table * factor).contiguous())


def copied(k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, longest: int) -> Paged:
    """The pages of the first ``longest`` positions of every row, side by side. ``table``: of used_pages."""
    count = -(-longest // k_cache.shape[2])
    pages = table[:, :count].flatten().long()
    places = torch.arange(pages.shape[0], device=table.device, dtype=torch.int32).view(table.shape[0], count)
    return Paged(k_cache[pages].contiguous(), v_cache[pages].contiguous(), places)


def positions(cache: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[…, heads, D], contiguous: the entries at ``places`` (int64, any shape) of ``rows`` (int64, the same shape)."""
    granularity = cache.shape[2]
    blocks = table[rows, places // granularity].long()
    return cache[blocks, :, places % granularity].contiguous()
