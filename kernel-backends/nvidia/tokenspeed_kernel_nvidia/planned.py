"""attention.decode and attention.extend by FlashInfer's planned kernels; contracts in tokenspeed_kernel.ops.attention.

The library plans on the host how rows are cut over the device's blocks. The plan of a forward serves all layers of a
cache group (tokenspeed_kernel.steps); making it waits for the device once, so that no graph holds its calls
(tokenspeed_kernel.recording). Pages are [pages, heads, page, head_dim], "HND" there, at any strides that keys and
values share: ours.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tokenspeed_kernel.page_lists import (
    ListedRows,
    PagedRows,
    SeenQueries,
    listed,
    ragged_rows,
    seen_queries,
    settle,
    uniform_rows,
    without_unseen_pages,
)
from tokenspeed_kernel.recording import refuse_capture
from tokenspeed_kernel.steps import present_forward
from tokenspeed_kernel.wrapped_library import library_module, note_variant
from tokenspeed_kernel_nvidia.library import generation_of, scratch

KEPT_PLANS = 16
"""Plans that are kept, a wrapper with memory of its own each: one for each cache group, kind of rows and model."""


@dataclass(frozen=True)
class Call:
    """What a plan is made for, beside the rows."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    scale: float
    window: int
    soft_cap: float
    sunk: bool

    @property
    def window_left(self) -> int:
        """Keys before a query's own that it sees, as the library counts; -1: all."""
        return self.window - 1


class Plan:
    """A wrapper of the library and the rows it is planned for."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._made_for: object = None
        self.rows: ListedRows
        self.seen: SeenQueries
        self.wrapper = self._wrapper()

    def _wrapper(self) -> Any:
        call = self._call
        note_variant(
            "flashinfer paged attention", call.dtype, call.head_dim, call.window > 0, call.soft_cap > 0.0, call.sunk
        )
        if not call.sunk:
            return library_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
                scratch(call.device), kv_layout="HND", backend=generation_of(call.device)
            )
        return library_module("flashinfer.attention").BatchAttentionWithAttentionSinkWrapper(
            scratch(call.device),
            kv_layout="HND",
            backend=generation_of(call.device),
            q_data_type=call.dtype,
            kv_data_type=call.dtype,
            head_dim_qk=call.head_dim,
            head_dim_vo=call.head_dim,
            window_left=call.window_left,
        )

    def refresh(self, rows: PagedRows, queries: int) -> None:
        """Plans for these rows, unless that was done in this forward. RecordingError where a graph takes calls."""
        refuse_capture("flashinfer's planned attention")
        forward = present_forward()
        wanted = (forward, queries, rows.page_table.shape, rows.seq_lens.data_ptr(), rows.query_start.shape)
        if forward is not None and wanted == self._made_for:
            return
        self._made_for = wanted
        self.seen = seen_queries(rows, queries)
        self.rows = kept = listed(without_unseen_pages(rows, self._call.window))
        if not kept.queries:
            return
        call = self._call
        self.wrapper.plan(
            kept.query_start,
            kept.page_start,
            kept.pages,
            kept.last_page,
            call.heads,
            call.kv_heads,
            call.head_dim,
            call.page,
            causal=True,
            sm_scale=call.scale,
            window_left=call.window_left,
            logits_soft_cap=call.soft_cap,
            q_data_type=call.dtype,
            kv_data_type=call.dtype,
        )


@lru_cache(maxsize=KEPT_PLANS)
def _plan_of(call: Call, table: int, ragged: bool) -> Plan:  # noqa: ARG001 - a plan for each table and kind of rows
    """The plan for a call over the page table at address ``table``."""
    return Plan(call)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    soft_cap: float,
    ragged: bool,
) -> None:
    call = Call(
        q.device, k_cache.dtype, q.shape[1], k_cache.shape[1], q.shape[2], rows.page, scale, window, soft_cap,
        sinks is not None,
    )  # fmt: skip
    plan = _plan_of(call, rows.page_table.data_ptr(), ragged)
    plan.refresh(rows, q.shape[0])
    place = slice(plan.rows.first_query, plan.rows.first_query + plan.rows.queries)
    found = torch.zeros(q.shape, dtype=call.dtype, device=q.device)
    if plan.rows.queries:
        extras = () if sinks is None else (sinks, scale)
        plan.wrapper.run(q[place].to(call.dtype), (k_cache, v_cache), *extras, out=found[place])
    settle(plan.seen, found, out)


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
    if q.shape[0]:
        rows = uniform_rows(page_table, seq_lens, k_cache.shape[2], q.shape[0])
        _attend(q, k_cache, v_cache, rows, scale, window, out, sinks, soft_cap, ragged=False)


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
    if q.shape[0] and seq_lens.shape[0]:
        rows = ragged_rows(page_table, query_start, seq_lens, k_cache.shape[2], q.shape[0])
        _attend(q, k_cache, v_cache, rows, scale, window, out, sinks, soft_cap, ragged=True)
