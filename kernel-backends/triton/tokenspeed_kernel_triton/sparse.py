"""attention.index_select and mla_selected on the device; contracts in tokenspeed_kernel.ops.sparse."""

from functools import partial

import torch

from tokenspeed_kernel.ops.split_plan import best_split_count
from tokenspeed_kernel_triton import paged_attention
from tokenspeed_kernel_triton.configs import float32_products, index_tile, row_blocks, selected_tile
from tokenspeed_kernel_triton.device import architecture_of, loadable, processors_of
from tokenspeed_kernel_triton.loading import Launch, power_of_two

SCORES_BYTES = 256 << 20
"""Of the scores that are held at a time; a call with more takes its queries in parts."""

STRETCH = 2048
"""Scores that a block looks at at a time."""

_SELECTED_TILE = 64
"""Selected entries that a split takes at least."""


def scores_of(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    stride: int,
    first_query: int,
    scores: torch.Tensor,
) -> Launch:
    """The launch of the scores [queries, entries] of the queries from ``first_query`` on."""
    queries, entries = scores.shape
    heads, width = q.shape[1:]
    tile = index_tile(architecture_of(q.device))
    arguments = (
        q,
        weights,
        loadable(index_cache),
        page_table,
        query_start,
        seq_lens,
        scores,
        first_query,
        queries,
        seq_lens.shape[0],
        stride,
        q.stride(0),
        index_cache.stride(0),
        index_cache.stride(2),
        page_table.stride(0),
        scores.stride(0),
    )
    constants = {
        "HEADS": heads,
        "BLOCK_HEADS": power_of_two(heads, 16),
        "DIM": width,
        "BLOCK_DIM": power_of_two(width, 16),
        "PAGE": index_cache.shape[2],
        "QUERIES": tile.rows,
        "BLOCK_N": tile.keys,
        "PRECISION": float32_products("indexer", architecture_of(q.device)),
    }
    grid = (-(-entries // tile.keys), -(-queries // tile.rows))
    return Launch("sparse", "index_scores", grid, arguments, constants, tile.warps, tile.stages)


def best_of(
    scores: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    stride: int,
    first_query: int,
    selected: torch.Tensor,
) -> Launch:
    """The launch that chooses among the scores of the queries from ``first_query`` on."""
    numbers = (first_query, seq_lens.shape[0], stride, scores.stride(0), selected.shape[1])
    arguments = (scores, query_start, seq_lens, selected, *numbers)
    return Launch("sparse", "index_best", (scores.shape[0],), arguments, {"BLOCK": STRETCH}, warps=8)


def index_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    stride: int,
    selected: torch.Tensor,
) -> None:
    """attention.index_select."""
    queries, entries = q.shape[0], page_table.shape[1] * index_cache.shape[2]
    if queries == 0 or seq_lens.shape[0] == 0 or selected.shape[1] == 0:
        return
    held = min(queries, max(1, SCORES_BYTES // (4 * max(1, entries))))
    scores = torch.empty(held, entries, dtype=torch.float32, device=q.device)
    for first in range(0, queries, held):
        part = scores[: min(held, queries - first)]
        rows = (query_start, seq_lens, stride, first)
        scores_of(q, weights, index_cache, page_table, *rows, part).run()
        best_of(part, *rows, selected).run()


def selected_of(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rounded: bool,
) -> Launch:
    """The launch for out [S, T, Hq, L] and lse [S, T, Hq]."""
    queries, heads, width = q_latent.shape
    rope, architecture = q_rope.shape[2], architecture_of(q_latent.device)
    tile = selected_tile(architecture, rounded, latent_cache.itemsize == 1)
    block_m = row_blocks(heads, tile.rows)
    arguments = (
        *map(loadable, (q_latent, q_rope if rope else q_latent, latent_cache)),
        page_table,
        query_start,
        selected,
        out,
        out if lse is None else lse,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        latent_cache.stride(0),
        latent_cache.stride(2),
        page_table.stride(0),
        out.stride(0) if out.shape[0] > 1 else 0,
        0 if lse is None else lse.stride(0),
        float(scale),
        query_start.shape[0] - 1,
        selected.shape[1],
    )
    constants = {
        "HEADS": heads,
        "DIM": width,
        "BLOCK_DIM": power_of_two(width, 16),
        "ROPE": rope,
        "BLOCK_ROPE": power_of_two(rope, 16) if rope else 16,
        "PAGE": latent_cache.shape[2],
        "BLOCK_M": block_m,
        "BLOCK_N": tile.keys,
        "WRITE_LSE": lse is not None,
        "ROUNDED": rounded,
        "PRECISION": float32_products("latent", architecture),
    }
    grid = (queries, -(-heads // block_m), out.shape[0])
    return Launch("sparse", "attend_selected", grid, arguments, constants, tile.warps, tile.stages)


def attend_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rounded: bool,
    splits: int | None = None,
) -> None:
    """attention.mla_selected over ``splits`` parts of what is selected; None: as many as keep the device busy."""
    queries, heads, width = q_latent.shape
    if queries == 0 or query_start.shape[0] < 2:
        return
    if rounded and q_latent.dtype is torch.float32:
        q_latent, q_rope = paged_attention.rounded_queries(q_latent, q_rope)
    read = (q_latent, q_rope, latent_cache, page_table, query_start, selected, scale)
    if splits is None:
        tile = selected_tile(architecture_of(q_latent.device), rounded, latent_cache.itemsize == 1)
        blocks = queries * -(-heads // row_blocks(heads, tile.rows))
        parts = max(1, selected.shape[1] // _SELECTED_TILE)
        splits = best_split_count(blocks, parts, processors_of(q_latent.device))
    if splits == 1:
        selected_of(*read, out.unsqueeze(0), None if lse is None else lse.unsqueeze(0), rounded).run()
        return
    partials, partial_lse = paged_attention.split_workspace(queries, heads, splits, width, q_latent.device)
    selected_of(*read, partials, partial_lse, rounded).run()
    # what belongs to no row is left alone, so nothing of it may be merged
    paged_attention.merge_of(partials, partial_lse, None, out, lse, query_start).run()


def _mla_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    rounded: bool,
) -> None:
    read = (q_latent, q_rope, latent_cache, page_table, query_start, selected, scale)
    attend_selected(*read, out, lse, rounded)


mla_selected, rounded_mla_selected = (partial(_mla_selected, rounded=rounded) for rounded in (False, True))
