"""The registered kernels: the operations of tokenspeed_kernel.ops, made of the calls of decode.py.

Their activations come in float32. Queries are rounded to bfloat16, and so are the weights of the softmax and, of the
prefill, keys and values, which is what the trait ``activations`` lets them do; what a cache of 8 bits holds is exact in
bfloat16.
"""

import torch

from tokenspeed_mla.addressing import LATENT, WIDTH
from tokenspeed_mla.decode import by_group, launch_decode, mla_decode, tile_rows_on
from tokenspeed_mla.decode import merge_partials as merge_rows
from tokenspeed_mla.plan import DecodePlan
from tokenspeed_mla.prefill import mla_prefill


def _queries(q_latent: torch.Tensor, q_rope: torch.Tensor, batch: int) -> torch.Tensor:
    """Both parts as mla_decode takes them: [B, q_len, H, 576], rounded."""
    tokens, heads, _ = q_latent.shape
    q = torch.empty((batch, tokens // batch, heads, WIDTH), dtype=torch.bfloat16, device=q_latent.device)
    rows = q.view(tokens, heads, WIDTH)
    rows[..., :LATENT].copy_(q_latent)
    rows[..., LATENT:].copy_(q_rope)
    return q


def decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """attention.mla_decode."""
    batch = seq_lens.shape[0]
    if batch == 0:
        return
    q = _queries(q_latent, q_rope, batch)
    found_lse = None if lse is None else lse.view(q.shape[:3])
    into = out.view(*q.shape[:3], LATENT)
    mla_decode(q, latent_cache[:, 0], page_table, seq_lens, scale, out=into, lse=found_lse)


def decode_partial(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """attention.mla_decode_partial."""
    batch = seq_lens.shape[0]
    if batch == 0:
        return
    q = _queries(q_latent, q_rope, batch)
    _, q_len, heads, _ = q.shape
    plan = DecodePlan(batch, q_len, heads, out.shape[0], tile_rows_on(q.device, heads, q_len, latent_cache.dtype))
    launch_decode(plan, q, latent_cache[:, 0], page_table, seq_lens, scale, *by_group(plan, out, lse))


def extend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """attention.mla_extend: every token is a request of its own to the decode, whose length ends with it. From 64 on
    its heads fill the tiles as well as several tokens' would. Nothing waits for the device."""
    tokens, heads, _ = q_latent.shape
    rows = seq_lens.shape[0]
    if tokens == 0 or rows == 0:
        return
    places = torch.arange(tokens, dtype=torch.int32, device=out.device)
    owners = torch.searchsorted(query_start[1:], places, right=True)
    there = owners < rows
    owners = owners.clamp(max=rows - 1)
    lengths = seq_lens[owners] - query_start[owners + 1] + places + 1
    lengths = torch.where(there, lengths.clamp(min=0), -1).to(torch.int32)
    q = _queries(q_latent, q_rope, tokens)
    plan = DecodePlan(tokens, 1, heads, 1, tile_rows_on(q.device, heads, 1, latent_cache.dtype))
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=out.device)
    launch_decode(plan, q, latent_cache[:, 0], page_table[owners], lengths, scale, *by_group(plan, out, lse))


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
) -> None:
    """attention.ragged: queries, keys and values rounded to bfloat16."""
    q, k, v = (part.to(torch.bfloat16, memory_format=torch.contiguous_format) for part in (q, k, v))
    mla_prefill(q, k, v, query_start, key_start, scale, causal=causal, out=out, lse=lse)


def merge_partials(
    partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """attention.merge_partials."""
    splits, tokens, heads, _ = partials.shape
    rows = tokens * heads
    merge_rows(
        partials.view(splits, rows, LATENT),
        partial_lse.view(splits, rows),
        out.view(rows, LATENT),
        None if lse is None else lse.view(rows),
    )
