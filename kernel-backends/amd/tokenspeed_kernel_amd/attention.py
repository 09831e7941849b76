"""attention.decode and attention.extend by AITER's unified attention; contracts in tokenspeed_kernel.ops.attention.

It reads our page tables and lengths as they are, and pages at any strides: theirs are [pages, page, heads, head_dim],
of which ours is a view. Nothing is planned and nothing waits for the device.
"""

import torch

from tokenspeed_kernel.page_lists import (
    PagedRows,
    ragged_rows,
    seen_queries,
    settle,
    uniform_rows,
    with_leading_row,
    without_unseen_pages,
)
from tokenspeed_kernel.wrapped_library import library_module, note_variant


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int,
    found: torch.Tensor,
    sinks: torch.Tensor | None,
    soft_cap: float,
) -> None:
    note_variant(
        "aiter unified attention", k_cache.dtype, q.shape[2], rows.page, window, sinks is not None, soft_cap > 0.0
    )
    library_module("aiter.ops.triton.unified_attention").unified_attention(
        q=q.to(k_cache.dtype),
        k=k_cache.transpose(1, 2),
        v=v_cache.transpose(1, 2),
        out=found,
        cu_seqlens_q=rows.query_start,
        max_seqlen_q=rows.most,
        seqused_k=rows.seq_lens,
        max_seqlen_k=rows.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=rows.page_table,
        softcap=soft_cap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        sinks=sinks,
    )


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """attention.decode, with queries and the weights of the softmax rounded to the cache's type."""
    if q.shape[0] == 0:
        return
    rows = without_unseen_pages(uniform_rows(page_table, seq_lens, k_cache.shape[2], q.shape[0]), window)
    found = torch.empty(q.shape, dtype=k_cache.dtype, device=q.device)
    _attend(q, k_cache, v_cache, rows, scale, window, found, sinks, soft_cap)
    settle(seen_queries(rows, q.shape[0]), found, out)


def extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """attention.extend, rounded as decode is."""
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return
    rows = without_unseen_pages(ragged_rows(page_table, query_start, seq_lens, k_cache.shape[2], q.shape[0]), window)
    found = torch.empty(q.shape, dtype=k_cache.dtype, device=q.device)
    _attend(q, k_cache, v_cache, with_leading_row(rows), scale, window, found, sinks, soft_cap)
    settle(seen_queries(rows, q.shape[0]), found, out)
