"""attention.decode and attention.extend over a bfloat16 cache, queries and weights rounded to bfloat16.

A step of one query a row reads the cache in its pages. Rows of several queries do where a page is a multiple of 128
tokens and a head has 128 elements; their keys are laid side by side first otherwise, and behind a window always, for a
page's positions before it are nobody's. Sinks join the softmax behind it: a sink s takes the share
1 / (1 + exp(lse - s)).
"""

from dataclasses import dataclass

import torch

from tokenspeed_kernel_npu import fused
from tokenspeed_kernel_npu.fused import Attended
from tokenspeed_kernel_npu.lengths import of_step, on_host
from tokenspeed_kernel_npu.pages import copied, in_place, passes, positions, used_pages
from tokenspeed_kernel_npu.rows import Rows

MOST_HEADS = 256
_BFLOAT16 = torch.bfloat16


def _check_heads(heads: int) -> None:
    if heads > MOST_HEADS:
        raise ValueError(
            f"npu_fused_infer_attention_score_v2 takes up to {MOST_HEADS} query heads, got {heads}; share them out "
            "over more ranks"
        )


def _finished(found: Attended, sinks: torch.Tensor | None) -> torch.Tensor:
    """float32, with the sinks' shares taken off."""
    out = found.out.float()
    if sinks is None or found.lse is None:
        return out
    return out * torch.sigmoid(found.lse - sinks).unsqueeze(-1)


@dataclass(frozen=True)
class _Reads:
    """What all rows of a call share, and its table of used_pages."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    scale: float
    window: int
    lse: bool

    @property
    def page(self) -> int:
        return self.k_cache.shape[2]

    @property
    def of_token(self) -> int:
        """Elements of a token's keys."""
        return self.k_cache.shape[1] * self.k_cache.shape[3]


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
    table = used_pages(page_table, seq_lens, k_cache.shape[2])
    reads = _Reads(k_cache, v_cache, table, scale, window, sinks is not None)
    query = q.to(_BFLOAT16).contiguous()
    found = _behind_window(query, reads, seq_lens, lengths) if window else _whole_rows(query, reads, lengths)
    out.copy_(torch.where((seq_lens > 0)[:, None, None], _finished(found, sinks), 0.0))


def _whole_rows(query: torch.Tensor, reads: _Reads, lengths: list[int]) -> Attended:
    """One query a row over all its positions. A row without any is given one, of the null page: the form of a batch
    does not hang on its lengths."""
    seen = [max(1, length) for length in lengths]
    paged = in_place(reads.k_cache, reads.v_cache, reads.table)
    if paged is not None:
        return fused.single_paged(query, paged, seen, reads.scale, reads.lse)
    longest = -(-max(seen) // reads.page) * reads.page
    parts = []
    for rows in passes([longest * reads.of_token] * len(seen)):
        paged = copied(reads.k_cache, reads.v_cache, reads.table[rows], longest)
        parts.append(fused.single_paged(query[rows], paged, seen[rows], reads.scale, reads.lse))
    return Attended.joined(parts)


def _behind_window(query: torch.Tensor, reads: _Reads, seq_lens: torch.Tensor, lengths: list[int]) -> Attended:
    """One query a row over the positions that its window shows. A row that has fewer repeats its last one, which is not
    read."""
    longest = max(1, min(reads.window, max(lengths)))
    last = (seq_lens.long() - 1).clamp(min=0).unsqueeze(1)
    first = (seq_lens.long() - reads.window).clamp(min=0).unsqueeze(1)
    places = torch.minimum(first + torch.arange(longest, device=query.device), last)
    owners = torch.arange(len(lengths), device=query.device).unsqueeze(1).expand_as(places)
    seen, parts = [max(1, min(reads.window, length)) for length in lengths], []
    for rows in passes([longest * reads.of_token] * len(seen)):
        k, v = (positions(cache, reads.table, owners[rows], places[rows]) for cache in (reads.k_cache, reads.v_cache))
        parts.append(fused.single_dense(query[rows], k, v, seen[rows], reads.scale, reads.lse))
    return Attended.joined(parts)


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
    reads = _Reads(k_cache, v_cache, table, scale, window, sinks is not None)
    query = rows.taken(q).to(_BFLOAT16).contiguous()
    fits = q.shape[2] == fused.TND_HEAD_DIM and reads.page % fused.RAGGED_PAGES == 0 and not window
    paged = in_place(k_cache, v_cache, table) if fits else None
    if paged is not None:
        found = fused.ragged_paged(query, paged, rows.counts, rows.lengths, scale, reads.lse)
    else:
        found = _side_by_side(query, reads, rows)
    rows.put(out, _finished(found, sinks))


def _side_by_side(query: torch.Tensor, reads: _Reads, rows: Rows) -> Attended:
    """The queries over their rows' keys, copied from the first that one of them sees."""
    firsts = rows.first_keys(reads.window)
    seen = [length - first for length, first in zip(rows.lengths, firsts, strict=True)]
    by_row, parts = torch.split(query, rows.counts), []
    for some in passes([count * reads.of_token for count in seen]):
        part = rows.part(some)
        owner, places = part.key_places(firsts[some], query.device)
        k, v = (positions(cache, reads.table[some], owner, places) for cache in (reads.k_cache, reads.v_cache))
        q = torch.cat(by_row[some])
        parts.append(
            fused.ragged_dense(q, k, v, part.counts, seen[some], reads.scale, window=reads.window, lse=reads.lse)
        )
    return Attended.joined(parts)
