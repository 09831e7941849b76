"""attention.mla_decode, mla_extend and mla_extend_expanded over a bfloat16 cache, queries and weights rounded.

The operator wants latents and rotated keys apart, each contiguous, in pages of 128 tokens, and the cache has them side
by side in an entry. So the entries of the rows are copied apart first, once for all their queries: three times the
traffic of reading them in place. Every query is a row of its own to the operator, with its own length.
"""

from collections.abc import Callable
from itertools import accumulate

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_npu import fused
from tokenspeed_kernel_npu.fused import Attended
from tokenspeed_kernel_npu.lengths import of_step, on_host
from tokenspeed_kernel_npu.pages import passes, positions, used_pages
from tokenspeed_kernel_npu.rows import Rows

LATENT = 512
ROTARY = 64
PAGE = 128
"""Tokens of a page of the copied entries."""

MOST_HEADS = 128
EXPANDED_BYTES = 1 << 29
"""Keys and values that are expanded at a time, in heads of all rows."""

_BFLOAT16 = torch.bfloat16


def _even_heads(heads: int) -> int:
    """The next number of heads that the operator takes: a power of two up to 128."""
    if heads > MOST_HEADS:
        raise ValueError(
            f"npu_fused_infer_attention_score_v2 takes up to {MOST_HEADS} heads over latents, got {heads}; share them "
            "out over more ranks"
        )
    return 1 << (heads - 1).bit_length()


def _apart(
    cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents [B * n, 1, 128, 512] and rotated keys [B * n, 1, 128, 64] of the rows' positions, and the table [B, n] of
    these pages. Positions beyond a row's length hold anything."""
    batch, count = seq_lens.shape[0], -(-longest // PAGE)
    length = count * PAGE
    granularity = cache.shape[2]
    table = used_pages(page_table, seq_lens, granularity)[:, : -(-length // granularity)]
    entries = cache[table.long(), 0].flatten(1, 2)[:, :length]
    if entries.shape[1] < length:  # the table ends with the longest row
        entries = torch.nn.functional.pad(entries, (0, 0, 0, length - entries.shape[1]))
    latents, rotated = torch.split(entries, [LATENT, ROTARY], dim=-1)
    pages = torch.arange(batch * count, device=cache.device, dtype=torch.int32).view(batch, count)
    return latents.reshape(-1, 1, PAGE, LATENT).contiguous(), rotated.reshape(-1, 1, PAGE, ROTARY).contiguous(), pages


def _repeated(pages: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The table [B, n] with row b counts[b] times. Equal counts are no tensor, so a graph can be captured."""
    if len(set(counts)) == 1:
        return pages.repeat_interleave(counts[0], dim=0)
    return torch.cat([row.expand(count, -1) for row, count in zip(torch.split(pages, 1), counts, strict=True)])


def _attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: list[int],
    counts: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, 512] and lse [T, Hq], float32: row b has counts[b] queries at the last of its lengths[b] positions;
    ``lengths`` are ``seq_lens`` on the host. What a query before a row's first position gives means nothing."""
    heads = q_latent.shape[1]
    spare = _even_heads(heads) - heads
    query, rope = (torch.nn.functional.pad(x.to(_BFLOAT16), (0, 0, 0, spare)).contiguous() for x in (q_latent, q_rope))
    starts, parts = [0, *accumulate(counts)], []
    for rows in passes([max(1, *lengths) * LATENT] * len(lengths)):
        latents, rotated, pages = _apart(cache, page_table[rows], seq_lens[rows], max(1, *lengths[rows]))
        tokens = slice(starts[rows.start], starts[rows.stop])
        ends = [
            max(1, length - count + 1 + place)
            for length, count in zip(lengths[rows], counts[rows], strict=True)
            for place in range(count)
        ]
        table = _repeated(pages, counts[rows])
        parts.append(fused.single_latent(query[tokens], rope[tokens], latents, rotated, table, ends, scale))
    found = Attended.joined(parts)
    assert found.lse is not None
    return found.out[:, :heads].float(), found.lse[:, :heads]


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
    width = q_latent.shape[0] // batch
    lengths = of_step(seq_lens, page_table.shape[1] * latent_cache.shape[2])
    found, total = _attend(q_latent, q_rope, latent_cache, page_table, seq_lens, lengths, [width] * batch, scale)
    ends = seq_lens.unsqueeze(1) - width + 1 + torch.arange(width, device=out.device, dtype=torch.int32)
    seen = (ends > 0).view(-1, 1)
    out.copy_(torch.where(seen.unsqueeze(-1), found, 0.0))
    if lse is not None:
        lse.copy_(torch.where(seen, total, -torch.inf))


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
    """attention.mla_extend."""
    rows = Rows.of(on_host(query_start), on_host(seq_lens))
    rows.clear_blind(out)
    if not rows.owners:
        return
    held = torch.tensor(rows.owners, device=out.device)
    queries = rows.taken(q_latent), rows.taken(q_rope)
    found, _ = _attend(*queries, latent_cache, page_table[held], seq_lens[held], rows.lengths, rows.counts, scale)
    rows.put(out, found)


def make_extend_expanded(weight: QuantizedTensor, heads: int) -> Callable[..., None]:
    """attention.mla_extend_expanded for 128 plain and value elements. Latents are multiplied in bfloat16, which is what
    they and the weight are stored in; the products are rounded to it."""
    matrices = weight.plane.view(heads, 2, fused.TND_HEAD_DIM, LATENT)

    def mla_extend_expanded(
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        page_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        rows = Rows.of(on_host(query_start), on_host(seq_lens))
        rows.clear_blind(out)
        if not rows.owners:
            return
        held = torch.tensor(rows.owners, device=out.device)
        table = used_pages(page_table[held], seq_lens[held], latent_cache.shape[2])
        owner, places = rows.key_places(rows.first_keys(0), out.device)
        entries = positions(latent_cache, table, owner, places)[:, 0]
        query = rows.taken(q).to(_BFLOAT16)
        bytes_of_head = 2 * entries.shape[0] * (2 * fused.TND_HEAD_DIM + ROTARY)
        step = max(1, EXPANDED_BYTES // bytes_of_head)
        parts = [
            _expanded(query[:, part], entries, matrices[part], rows, scale)
            for part in (slice(start, start + step) for start in range(0, heads, step))
        ]
        rows.put(out, torch.cat(parts, dim=1))

    return mla_extend_expanded


def _expanded(
    query: torch.Tensor, entries: torch.Tensor, matrices: torch.Tensor, rows: Rows, scale: float
) -> torch.Tensor:
    """float32 [T, heads, 128]: attention of some heads, whose keys and values are made of ``entries`` [S, 576]."""
    heads = matrices.shape[0]
    latents, rotated = torch.split(entries, [LATENT, ROTARY], dim=-1)
    products = torch.nn.functional.linear(latents, matrices.reshape(-1, LATENT))
    keys, values = products.view(entries.shape[0], heads, 2, fused.TND_HEAD_DIM).unbind(dim=2)
    plain, rope = torch.split(query, [fused.TND_HEAD_DIM, ROTARY], dim=-1)
    ropes = rope.contiguous(), rotated.unsqueeze(1).expand(-1, heads, -1).contiguous()
    found = fused.ragged_dense(
        plain.contiguous(), keys.contiguous(), values.contiguous(), rows.counts, rows.lengths, scale, ropes=ropes
    )
    return found.out.float()
