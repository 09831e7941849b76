"""What the cases of every paged attention share: scattered pages with nothing readable around them, and the truth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenspeed_kernel.numerics.cases import UNIT_ROUNDOFF
from tokenspeed_kernel.ops.paged_reference import ScoreRules
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.signature import FormatSignature

ROUNDOFF = UNIT_ROUNDOFF[torch.float32]
UNREAD = -0x70000000
"""A page table entry that leads far outside the cache."""


def kv_dtype(signature: FormatSignature) -> torch.dtype:
    """The torch dtype of a signature's cache."""
    dtype: torch.dtype = getattr(torch, signature["kv"].storage_dtype)
    return dtype


def may_round(dtype: torch.dtype) -> bool:
    """Whether readers of such a cache may round queries and weights to bfloat16: it holds nothing finer itself."""
    return dtype in (torch.bfloat16, torch.float8_e4m3fn)


def roundoff_of(activations: str) -> float:
    """The unit roundoff of what the trait ``activations`` allows queries and weights to be rounded to."""
    return 0.0 if activations == "float32" else UNIT_ROUNDOFF[getattr(torch, activations)]


def first_seen(position: int, window: int) -> int:
    """The first position that the query at ``position`` sees; 0 before a row's beginning."""
    return max(0, position - window + 1) if window else 0


@dataclass(frozen=True)
class Pages:
    """A cache and the page tables of its rows.

    Attributes:
        arena: [blocks, fields, heads, g, D]; NaN wherever no position lies that a query of its row sees.
        tables: int32 [B, pages]; unread entries lead nowhere.
    """

    arena: torch.Tensor
    tables: torch.Tensor

    def in_integers(self) -> "Pages":
        """The same with every entry rounded to an integer."""
        return Pages(self.arena.float().round().to(self.arena.dtype), self.tables)

    def positions(self, row: int, field: int, width: int, first: int, stop: int) -> torch.Tensor:
        """float64 [stop - first, heads, width]: the first ``width`` elements of a field at these positions of a row."""
        places, granularity = torch.arange(first, stop), self.arena.shape[3]
        blocks = self.tables[row].long()[places // granularity]
        return self.arena[blocks, field, :, places % granularity, :width].double()


def scatter_pages(
    field: tuple[int, int, int, int],
    seq_lens: Sequence[int],
    firsts: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Pages:
    """Random entries at the positions firsts[b] … seq_lens[b] - 1 of every row b, blocks in random order; ``field``:
    fields of a block, heads, g, D."""
    fields, heads, granularity, width = field
    pages = [(length + granularity - 1) // granularity for length in seq_lens]
    order = (torch.randperm(sum(pages) + 2, generator=generator) + 1).to(torch.int32)
    arena = torch.full((sum(pages) + 3, *field), torch.nan, dtype=dtype)
    tables = torch.full((len(pages), max([1, *pages])), UNREAD, dtype=torch.int32)
    taken = 0
    for row, (count, length, first) in enumerate(zip(pages, seq_lens, firsts, strict=True)):
        first_page = first // granularity
        tables[row, first_page:count] = order[taken + first_page : taken + count]
        for page, block in enumerate(tables[row, first_page:count].tolist(), first_page):
            rows = slice(max(0, first - page * granularity), min(granularity, length - page * granularity))
            fresh = torch.randn(fields, heads, rows.stop - rows.start, width, generator=generator)
            arena[block, :, :, rows] = fresh.to(dtype)
        taken += count
    return Pages(arena, tables)


_FAR = (1 << 31) + 128  # bytes between two blocks


def far_arena(field: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor | None:
    """An arena [3, fields, heads, g, D] whose blocks lie more than 2^31 bytes apart, NaN in all but block 0, which is
    not touched; None where memory forbids it."""
    fields, heads, granularity, width = field
    apart = _FAR // dtype.itemsize
    total = 2 * apart + fields * heads * granularity * width
    if current_platform().memory_bytes < total * dtype.itemsize:
        return None
    try:
        storage = torch.empty(total, dtype=dtype)
    except RuntimeError:
        return None
    dense = torch.empty(field, device="meta").stride()
    arena = storage.as_strided((3, *field), (apart, *dense))
    arena[1:] = torch.nan
    return arena


def far_pages(field: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Pages | None:
    """Random entries in the two blocks of a far arena, of one row that has the second one first; None as there."""
    arena = far_arena(field, dtype)
    if arena is None:
        return None
    arena[1:] = torch.randn(2, *field, generator=generator).to(dtype)
    return Pages(arena, torch.tensor([[2, 1]], dtype=torch.int32))


@dataclass(frozen=True)
class Attention:
    """What float64 says, and how far float32 may be off: out and its bound [n, Hq, Dv], lse and its bound [n, Hq]."""

    out: torch.Tensor
    out_bound: torch.Tensor
    lse: torch.Tensor
    lse_bound: torch.Tensor


def _masked_scores(
    q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, rules: ScoreRules, rounding: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [n, Hq, L], -inf where unseen, and the error [n, Hq] that float32, and queries rounded to ``rounding``,
    may make in any of them."""
    scores = torch.einsum("nhd,lhd->nhl", q, keys) * rules.scale
    size = torch.einsum("nhd,lhd->nhl", q.abs(), keys.abs()) * rules.scale
    largest = size.masked_fill(~seen.unsqueeze(1), 0.0).amax(dim=-1)
    error = ROUNDOFF * (keys.shape[2] ** 0.5 + 10.0) * largest
    if rounding:  # each term is off by its own share of it: the sum of them by the root of the sum of squares
        energy = torch.einsum("nhd,lhd->nhl", q.square(), keys.square()).sqrt() * rules.scale
        error = error + 4.0 * rounding * energy.masked_fill(~seen.unsqueeze(1), 0.0).amax(dim=-1)
    if rules.soft_cap:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
        error = error + 16.0 * ROUNDOFF * largest.clamp(max=rules.soft_cap)
    return scores.masked_fill(~seen.unsqueeze(1), -torch.inf), error


def exact_attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    rules: ScoreRules,
    rounding: float = 0.0,
) -> Attention:
    """Float64 attention of the queries q [n, Hq, D] at ``positions`` [n] over keys and values [L, Hkv, …] at the
    positions from ``first`` on. A query without a key gives zeros and -inf, exactly. ``rounding``: the unit roundoff of
    what queries and weights may be rounded to, 0 for none; the bounds grow by it."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, dim=1) for x in (keys, values))
    place = first + torch.arange(keys.shape[0])
    seen = place <= positions.unsqueeze(1)
    if rules.window:
        seen &= place > positions.unsqueeze(1) - rules.window
    if keys.shape[0] == 0:
        zeros, none = torch.zeros(*q.shape[:2], values.shape[2]).double(), torch.zeros(q.shape[:2]).double()
        return Attention(zeros, zeros, none - torch.inf, none)
    scores, error = _masked_scores(q.double(), keys, seen, rules, rounding)
    if rules.sinks is not None:
        sinks = rules.sinks.double().reshape(1, -1, 1).expand(q.shape[0], -1, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    blind = ~seen.any(dim=1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[0]]
    weights = weights.masked_fill(blind.reshape(-1, 1, 1), 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(blind.unsqueeze(1), -torch.inf)
    summing = ROUNDOFF * (seen.sum(dim=1, keepdim=True).double().sqrt() + 48.0)
    relative = 2.0 * error + summing + rounding
    return Attention(
        torch.einsum("nhl,lhd->nhd", weights, values),
        relative.unsqueeze(2) * torch.einsum("nhl,lhd->nhd", weights, values.abs()),
        lse,
        torch.where(blind.unsqueeze(1), 0.0, error + summing + 2.0 * ROUNDOFF * lse.abs()),
    )
