"""attention.mla_decode by FlashInfer's planned kernels; contract in tokenspeed_kernel.ops.mla.

Planned once a forward, as in planned.py. The cache's latents and its rotated keys go in as two views of it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tokenspeed_kernel.page_lists import (
    PagedRows,
    SeenQueries,
    listed,
    seen_queries,
    settle,
    single_queries,
    uniform_rows,
)
from tokenspeed_kernel.recording import refuse_capture
from tokenspeed_kernel.steps import present_forward
from tokenspeed_kernel.wrapped_library import library_module, note_variant
from tokenspeed_kernel_nvidia.library import generation_of, scratch
from tokenspeed_kernel_nvidia.planned import KEPT_PLANS

TILE_ROWS = 64
"""Pairs of a query and a head in one of the library's tiles; two tiles side by side from there on."""


@dataclass(frozen=True)
class LatentCall:
    """What a plan is made for, beside the rows."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    latent: int
    rotary: int
    page: int
    scale: float
    with_lse: bool


def whole_heads(heads: int) -> bool:
    """Whether tiles end where a query's heads end. The library refuses some rows of several queries where they do
    not, so that these go in as rows of one query."""
    return TILE_ROWS % heads == 0 or heads == 2 * TILE_ROWS


class LatentPlan:
    """A wrapper of the library and the rows it is planned for."""

    def __init__(self, call: LatentCall) -> None:
        self._call = call
        self._made_for: object = None
        self.seen: SeenQueries
        self.pages = 0
        note_variant("flashinfer latent attention", call.dtype, call.latent, call.rotary)
        self.wrapper: Any = library_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(
            scratch(call.device), backend=generation_of(call.device)
        )

    def refresh(self, rows: PagedRows) -> None:
        """Plans for these rows, unless that was done in this forward. RecordingError where a graph takes calls."""
        refuse_capture("flashinfer's planned latent attention")
        forward = present_forward()
        wanted = (forward, rows.most, rows.page_table.shape, rows.seq_lens.data_ptr())
        if forward is not None and wanted == self._made_for:
            return
        self._made_for = wanted
        call = self._call
        self.seen = seen_queries(rows, rows.count * rows.most)
        kept = listed(rows if whole_heads(call.heads) or rows.most == 1 else single_queries(rows))
        self.pages = kept.pages.shape[0]
        if not self.pages:
            return
        metadata = library_module("flashinfer.mla").MLAPlanMetadata.csr(
            kept.query_start.to(call.device),
            kept.page_start.to(call.device),
            kept.pages,
            kept.lengths.to(call.device),
        )
        self.wrapper.plan(
            metadata=metadata,
            num_heads=call.heads,
            head_dim_ckv=call.latent,
            head_dim_kpe=call.rotary,
            page_size=call.page,
            causal=True,
            sm_scale=call.scale,
            q_data_type=call.dtype,
            kv_data_type=call.dtype,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="basee" if call.with_lse else "none",
        )


@lru_cache(maxsize=KEPT_PLANS)
def _plan_of(call: LatentCall, table: int) -> LatentPlan:  # noqa: ARG001 - a plan for each table
    """The plan for a call over the page table at address ``table``."""
    return LatentPlan(call)


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """attention.mla_decode, with queries and the weights of the softmax rounded to the cache's type."""
    tokens, heads, latent = q_latent.shape
    if tokens == 0:
        return
    dtype, page = latent_cache.dtype, latent_cache.shape[2]
    call = LatentCall(q_latent.device, dtype, heads, latent, q_rope.shape[2], page, scale, lse is not None)
    plan = _plan_of(call, page_table.data_ptr())
    plan.refresh(uniform_rows(page_table, seq_lens, page, tokens))
    found = torch.zeros(q_latent.shape, dtype=dtype, device=out.device)
    found_lse = None if lse is None else torch.zeros(tokens, heads, dtype=torch.float32, device=out.device)
    if plan.pages:
        entries = latent_cache[:, 0]
        plan.wrapper.run(
            query=(q_latent.to(dtype), q_rope.to(dtype)),
            kv_cache=(entries[..., :latent], entries[..., latent:]),
            out=found,
            lse=found_lse,
            return_lse=lse is not None,
            return_lse_base_on_e=lse is not None,
        )
    settle(plan.seen, found, out)
    if lse is not None and found_lse is not None:
        settle(plan.seen, found_lse, lse, unseen=-torch.inf)
