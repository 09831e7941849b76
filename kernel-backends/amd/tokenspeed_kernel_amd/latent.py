"""attention.mla_decode by AITER's assembly kernels; contract in tokenspeed_kernel.ops.mla.

They take pages of one token, 16 or 128 heads and one query a row, and give no lse. Calls of another kind are the shared
Triton layer's, with the same rounding.
"""

from functools import lru_cache

import torch

from tokenspeed_kernel.page_lists import seen_queries, settle, uniform_rows
from tokenspeed_kernel.recording import refuse_capture
from tokenspeed_kernel.steps import present_forward
from tokenspeed_kernel.wrapped_library import library_module, note_variant
from tokenspeed_kernel_triton import attention

HEADS = (16, 128)
REACH = 1 << 32
"""Bytes that the kernels are known to address from the beginning of a cache: their offsets may have 32 bits."""

KEPT_LISTS = 8


def takes(q_latent: torch.Tensor, latent_cache: torch.Tensor, rows: int, lse: torch.Tensor | None) -> bool:
    """Whether a call is one that these kernels make."""
    blocks, _, page, width = latent_cache.shape
    entry = latent_cache.stride(2)
    last = (blocks - 1) * latent_cache.stride(0) + page * entry
    one_stride = entry == width and latent_cache.stride(0) % entry == 0
    near = last * latent_cache.itemsize <= REACH
    return lse is None and q_latent.shape[1] in HEADS and q_latent.shape[0] == rows and one_stride and near


class TokenLists:
    """The tokens of all rows, one behind the other, as entries of the cache; kept for the forward they were made in.

    Attributes:
        start: int32 [B + 1]: the first of each row.
        entries: int32 [tokens].
    """

    start: torch.Tensor
    entries: torch.Tensor

    def __init__(self) -> None:
        self._made_for: object = None

    def refresh(self, page_table: torch.Tensor, seq_lens: torch.Tensor, page: int, per_page: int) -> None:
        """Makes the lists, which waits for the device once, unless that was done in this forward. ``per_page``: entries
        from the beginning of a page to that of the next. RecordingError where a graph takes calls."""
        refuse_capture("aiter's latent decode")
        forward = present_forward()
        wanted = (forward, page_table.shape, seq_lens.data_ptr())
        if forward is not None and wanted == self._made_for:
            return
        self._made_for = wanted
        lengths = seq_lens.clamp(min=0)
        self.start = torch.zeros(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=self.start[1:])
        total = int(self.start[-1])
        rows = torch.arange(seq_lens.shape[0], device=seq_lens.device)
        owners = torch.repeat_interleave(rows, lengths.long(), output_size=total)
        tokens = torch.arange(total, device=seq_lens.device) - self.start.long()[owners]
        self.entries = page_table[owners, tokens // page] * per_page + (tokens % page).to(torch.int32)


@lru_cache(maxsize=KEPT_LISTS)
def _lists_of(table: int, page: int, per_page: int) -> TokenLists:  # noqa: ARG001 - one for each table
    """The lists for the page table at address ``table``."""
    return TokenLists()


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
    """attention.mla_decode, with queries and the weights of the softmax rounded to bfloat16."""
    rows = seq_lens.shape[0]
    if q_latent.shape[0] == 0:
        return
    if not takes(q_latent, latent_cache, rows, lse):
        attention.rounded_mla_decode(q_latent, q_rope, latent_cache, page_table, seq_lens, scale, out, lse)
        return
    page, entry, dtype = latent_cache.shape[2], latent_cache.stride(2), latent_cache.dtype
    per_page = latent_cache.stride(0) // entry
    lists = _lists_of(page_table.data_ptr(), page, per_page)
    lists.refresh(page_table, seq_lens, page, per_page)
    note_variant("aiter latent decode", q_latent.shape[1])
    found = torch.empty(q_latent.shape, dtype=dtype, device=out.device)
    entries = (latent_cache.shape[0] - 1) * per_page + page
    if lists.entries.shape[0]:
        library_module("aiter.mla").mla_decode_fwd(
            torch.cat([q_latent.to(dtype), q_rope.to(dtype)], dim=-1),
            latent_cache.as_strided((entries, 1, 1, entry), (entry, entry, entry, 1)),
            found,
            torch.arange(rows + 1, dtype=torch.int32, device=out.device),
            lists.start,
            lists.entries,
            torch.ones(rows, dtype=torch.int32, device=out.device),
            1,
            sm_scale=scale,
        )
    settle(seen_queries(uniform_rows(page_table, seq_lens, page, rows), rows), found, out)
