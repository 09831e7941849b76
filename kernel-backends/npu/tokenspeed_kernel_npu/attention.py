"""attention.decode and attention.extend over a bfloat16 cache, queries and weights rounded to bfloat16.

A step of one query a row reads the cache in its pages. Rows of several queries do where a page is a multiple of 128
tokens and a head has 128 elements; their keys are laid side by side first otherwise, and behind a window always, for a
page's positions before it are nobody's. Sinks join the softmax behind it: a sink s takes the share
1 / (1 + exp(lse - s)).
"""

import torch

from tokenspeed_kernel_npu import fused
from tokenspeed_kernel_npu.fused import Attended
from tokenspeed_kernel_npu.lengths import of_step, on_host
from tokenspeed_kernel_npu.pages import copied, in_place, positions, used_pages
from tokenspeed_kernel_npu.rows import Rows

MOST_HEADS = 256
_BFLOAT16 = torch.bfloat16


def _check_heads(heads: int) -> None:
    if heads > MOST_HEADS:
        raise ValueError(f"npu_fused_infer_attention_score_v2 takes up to {MOST_HEADS} query heads, got {heads}")


def _finished(found: Attended, sinks: torch.Tensor | None) -> torch.Tensor:
    """float32, with the sinks' shares taken off."""
    out = found.out.float()
    if sinks is None or found.lse is None:
        return out
    return out * torch.sigmoid(found.lse - sinks).unsqueeze(-1)


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
    """attention.decode."""
    assert soft_cap == 0.0, "the trait soft_cap is not admitted"
    batch = seq_lens.shape[0]
    if batch == 0:
        return
    width = q.shape[0] // batch
    if width > 1:
        starts = list(range(0, q.shape[0] + 1, width))
        _extend(q, k_cache, v_cache, page_table, starts, seq_lens, scale, window, out, sinks)
        return
    _check_heads(q.shape[1])
    lengths = of_step(seq_lens, page_table.shape[1] * k_cache.shape[2])
    query, table = q.to(_BFLOAT16).contiguous(), used_pages(page_table, seq_lens, k_cache.shape[2])
    lse = sinks is not None
    if window:
        found = _behind_window(query, k_cache, v_cache, table, seq_lens, lengths, window, scale, lse)
    else:
        # A row without keys is given one, of the null page, and made zeros below: the batch's form stays the same.
        at_least_one = [max(1, length) for length in lengths]
        paged = in_place(k_cache, v_cache, table) or copied(k_cache, v_cache, table, max(at_least_one))
        found = fused.single_paged(query, paged, at_least_one, scale, lse)
    out.copy_(torch.where((seq_lens > 0)[:, None, None], _finished(found, sinks), 0.0))


def _behind_window(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: list[int],
    window: int,
    scale: float,
    lse: bool,
) -> Attended:
    """One query a row over the positions that its window shows. A row that has fewer repeats its last one, which is not
    read."""
    longest = max(1, min(window, max(lengths)))
    last = (seq_lens.long() - 1).clamp(min=0).unsqueeze(1)
    first = (seq_lens.long() - window).clamp(min=0).unsqueeze(1)
    places = torch.minimum(first + torch.arange(longest, device=query.device), last)
    rows = torch.arange(len(lengths), device=query.device).unsqueeze(1).expand_as(places)
    k, v = (positions(cache, table, rows, places) for cache in (k_cache, v_cache))
    return fused.single_dense(query, k, v, [max(1, min(window, length)) for length in lengths], scale, lse)


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
    """attention.extend."""
    assert soft_cap == 0.0, "the trait soft_cap is not admitted"
    _extend(q, k_cache, v_cache, page_table, on_host(query_start), seq_lens, scale, window, out, sinks)


def _extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    starts: list[int],
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    _check_heads(q.shape[1])
    rows = Rows.of(starts, on_host(seq_lens))
    rows.clear_blind(out)
    if not rows.owners:
        return
    owners = torch.tensor(rows.owners, device=q.device)
    table = used_pages(page_table[owners], seq_lens[owners], k_cache.shape[2])
    query, lse = rows.taken(q).to(_BFLOAT16).contiguous(), sinks is not None
    fits = q.shape[2] == fused.TND_HEAD_DIM and k_cache.shape[2] % fused.RAGGED_PAGES == 0 and not window
    paged = in_place(k_cache, v_cache, table) if fits else None
    if paged is not None:
        found = fused.ragged_paged(query, paged, rows.counts, rows.lengths, scale, lse)
    else:
        firsts = rows.first_keys(window)
        owner, places = rows.key_places(firsts, q.device)
        k, v = (positions(cache, table, owner, places) for cache in (k_cache, v_cache))
        seen = [length - first for length, first in zip(rows.lengths, firsts, strict=True)]
        found = fused.ragged_dense(query, k, v, rows.counts, seen, scale, window=window, lse=lse)
    rows.put(out, _finished(found, sinks))
