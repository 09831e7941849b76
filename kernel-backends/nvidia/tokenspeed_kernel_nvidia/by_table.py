"""attention.decode, extend and mla_decode by the kernels of TensorRT-LLM that FlashInfer brings for sm_100 and sm_103.

They read our page tables and lengths as they are, so nothing is planned and nothing waits for the device: a graph may
capture them. Contracts in tokenspeed_kernel.ops.attention and .mla.
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
from tokenspeed_kernel_nvidia import planned_mla
from tokenspeed_kernel_nvidia.library import counting_scratch

PLAIN_DIM = 128
"""The plain part of a head of queries. The library asks for it and checks it; its kernels use the scale alone."""

UNSERVED = range(65, 128)
"""Numbers of heads that there are no kernels for latents of; the planned ones take them."""


def _window_left(window: int) -> int:
    return window - 1


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
    soft_cap: float = 0.0,  # noqa: ARG001 - the operation has it; the trait keeps it at 0
) -> None:
    """attention.decode, with queries and the weights of the softmax rounded to the cache's type."""
    if q.shape[0] == 0:
        return
    rows = without_unseen_pages(uniform_rows(page_table, seq_lens, k_cache.shape[2], q.shape[0]), window)
    note_variant("flashinfer decode by table", k_cache.dtype, q.shape[2], rows.page)
    found = torch.empty(q.shape, dtype=k_cache.dtype, device=q.device)
    library_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache(
        query=q.to(k_cache.dtype).contiguous(),
        kv_cache=(k_cache, v_cache),
        workspace_buffer=counting_scratch(q.device),
        block_tables=rows.page_table.contiguous(),
        seq_lens=rows.seq_lens,
        max_seq_len=rows.longest,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        window_left=_window_left(window),
        out=found,
        sinks=sinks,
        kv_layout="HND",
        backend="trtllm-gen",
        q_len_per_req=rows.most,
    )
    settle(seen_queries(rows, q.shape[0]), found, out)


def _key_starts(rows: PagedRows) -> torch.Tensor:
    """int32 [B + 1]: the first key of each row, were they one behind the other."""
    starts = torch.zeros(rows.count + 1, dtype=torch.int32, device=rows.seq_lens.device)
    torch.cumsum(rows.seq_lens, 0, dtype=torch.int32, out=starts[1:])
    return starts


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
    soft_cap: float = 0.0,  # noqa: ARG001 - the operation has it; the trait keeps it at 0
) -> None:
    """attention.extend, rounded as decode is."""
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return
    rows = ragged_rows(page_table, query_start, seq_lens, k_cache.shape[2], q.shape[0])
    led = with_leading_row(without_unseen_pages(rows, window))
    note_variant("flashinfer extend by table", k_cache.dtype, q.shape[2], rows.page)
    found = torch.empty(q.shape, dtype=k_cache.dtype, device=q.device)
    library_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache(
        query=q.to(k_cache.dtype).contiguous(),
        kv_cache=(k_cache, v_cache),
        workspace_buffer=counting_scratch(q.device),
        block_tables=led.page_table,
        seq_lens=led.seq_lens,
        max_q_len=q.shape[0],
        max_kv_len=led.longest,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        batch_size=led.count,
        cum_seq_lens_q=led.query_start,
        cum_seq_lens_kv=_key_starts(led),
        window_left=_window_left(window),
        out=found,
        kv_layout="HND",
        sinks=sinks,
        causal=True,
        backend="trtllm-gen",
    )
    settle(seen_queries(rows, q.shape[0]), found, out)


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
    """attention.mla_decode, rounded as decode is."""
    tokens, heads, latent = q_latent.shape
    if tokens == 0:
        return
    if heads in UNSERVED:
        planned_mla.mla_decode(q_latent, q_rope, latent_cache, page_table, seq_lens, scale, out, lse)
        return
    rows, dtype = uniform_rows(page_table, seq_lens, latent_cache.shape[2], tokens), latent_cache.dtype
    note_variant("flashinfer latent decode by table", dtype, rows.page)
    query = torch.cat([q_latent.to(dtype), q_rope.to(dtype)], dim=-1).view(rows.count, rows.most, heads, -1)
    found = torch.empty(rows.count, rows.most, heads, latent, dtype=dtype, device=out.device)
    found_lse = None if lse is None else torch.empty(tokens, heads, dtype=torch.float32, device=out.device)
    library_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla(
        query=query,
        kv_cache=latent_cache,
        workspace_buffer=counting_scratch(out.device),
        qk_nope_head_dim=PLAIN_DIM,
        kv_lora_rank=latent,
        qk_rope_head_dim=q_rope.shape[2],
        block_tables=rows.page_table.contiguous(),
        seq_lens=rows.seq_lens,
        max_seq_len=rows.longest,
        out=found,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",
        lse=found_lse,
        return_lse=lse is not None,
        return_lse_base=None if lse is None else "basee",
    )
    seen = seen_queries(rows, tokens)
    settle(seen, found.view(out.shape), out)
    if lse is not None and found_lse is not None:
        settle(seen, found_lse, lse, unseen=-torch.inf)
