"""The operations of attention that read a cache, as they are registered: exact and rounded to bfloat16.

A float32 query meets the cache widened to float32, products in full float32. Rounded kernels give the tensor cores
bfloat16; sums, scores and softmax stay float32 in both.
"""

from functools import partial

import torch

from tokenspeed_kernel_triton import paged_attention
from tokenspeed_kernel_triton.paged_attention import Reads


def _decode(
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
    *,
    rounded: bool,
) -> None:
    reads = Reads(k_cache, v_cache, page_table, None, seq_lens, scale, window, sinks, soft_cap, rounded)
    paged_attention.attend(q, None, reads, out, None)


def _extend(
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
    *,
    rounded: bool,
) -> None:
    reads = Reads(
        k_cache, v_cache, page_table, query_start, seq_lens, scale, window, sinks, soft_cap, rounded, "extend"
    )
    paged_attention.attend(q, None, reads, out, None, splits=1)


def _mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    rounded: bool,
) -> None:
    reads = Reads(latent_cache, None, page_table, None, seq_lens, scale, rounded=rounded, kind="latent")
    paged_attention.attend(q_latent, q_rope, reads, out, lse)


def _mla_decode_partial(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    rounded: bool,
) -> None:
    reads = Reads(latent_cache, None, page_table, None, seq_lens, scale, rounded=rounded, kind="latent")
    paged_attention.attend_splits(q_latent, q_rope, reads, out, lse)


def _mla_extend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    rounded: bool,
) -> None:
    reads = Reads(latent_cache, None, page_table, query_start, seq_lens, scale, rounded=rounded, kind="latent")
    paged_attention.attend(q_latent, q_rope, reads, out, None, splits=1)


def merge_partials(
    partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """attention.merge_partials."""
    if out.shape[0]:
        paged_attention.merge_of(partials, partial_lse, None, out, lse).run()


decode, rounded_decode = (partial(_decode, rounded=rounded) for rounded in (False, True))
extend, rounded_extend = (partial(_extend, rounded=rounded) for rounded in (False, True))
mla_decode, rounded_mla_decode = (partial(_mla_decode, rounded=rounded) for rounded in (False, True))
mla_decode_partial, rounded_mla_decode_partial = (
    partial(_mla_decode_partial, rounded=rounded) for rounded in (False, True)
)
mla_extend, rounded_mla_extend = (partial(_mla_extend, rounded=rounded) for rounded in (False, True))
