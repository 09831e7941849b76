"""Cases of attention.mla_decode, mla_decode_partial, mla_extend and merge_partials."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from tokenspeed_kernel.numerics.cases import Buffers, Case, Close, Expectation, Outputs, register_cases
from tokenspeed_kernel.numerics.paged import (
    ROUNDOFF,
    UNREAD,
    Attention,
    Pages,
    exact_attention,
    far_pages,
    kv_dtype,
    may_round,
    roundoff_of,
    scatter_pages,
)
from tokenspeed_kernel.ops.paged_reference import ScoreRules
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FLOAT32 = torch.float32


@dataclass(frozen=True)
class LatentShape:
    """What a case is about: query heads, elements of latent and rotary part, g, queries and length of each row."""

    name: str
    heads: int
    latent: int
    rotary: int
    granularity: int
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]


@dataclass(frozen=True)
class LatentReads:
    """One call of an operation that reads a latent cache.

    Attributes:
        spare: rows of q and out that belong to no row.
        q: float32 [T + spare, Hq, L + R]: both parts of the queries are views of it.
        pages: the cache, of one field and one head, and the page tables.
        activations: what may be rounded.
    """

    shape: LatentShape
    spare: int
    q: torch.Tensor
    pages: Pages
    scale: float
    activations: str = "float32"

    def _operands(self, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_latent, q_rope, latent_cache and page_table."""
        q = buffers.read_only("q", self.q)
        tables = buffers.read_only("page_table", torch.nn.functional.pad(self.pages.tables, (0, 5), value=UNREAD))
        latent = self.shape.latent
        return q[..., :latent], q[..., latent:], self.pages.arena[:, 0], tables[:, : self.pages.tables.shape[1]]

    def run_decode(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """All rows in one call, and once more without lse."""
        q_latent, q_rope, cache, tables = self._operands(buffers)
        out, lse = self._outputs(buffers, "out", "lse")
        seq_lens = torch.tensor(self.shape.seq_lens, dtype=torch.int32)
        fn(q_latent, q_rope, cache, tables, seq_lens, self.scale, out, lse)
        alone, _ = self._outputs(buffers, "out without lse", "unused")
        fn(q_latent, q_rope, cache, tables, seq_lens, self.scale, alone, None)
        return {"out": out, "lse": lse, "out without lse": alone}

    def split_decode(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """Every query in a call of its own."""
        q_latent, q_rope, cache, tables = self._operands(buffers)
        out, lse = self._outputs(buffers, "out", "lse")
        for row, place, length in self._single_queries():
            one, seq_lens = slice(place, place + 1), torch.tensor([length], dtype=torch.int32)
            table = tables[row : row + 1]
            fn(q_latent[one], q_rope[one], cache, table, seq_lens, self.scale, out[one], lse[one])
        return {"out": out, "lse": lse, "out without lse": out}

    def run_partial(self, fn: KernelFunction, buffers: Buffers, splits: int) -> Outputs:
        """All rows in one call."""
        out, lse = self._outputs(buffers, "out", "lse", splits)
        seq_lens = torch.tensor(self.shape.seq_lens, dtype=torch.int32)
        fn(*self._operands(buffers), seq_lens, self.scale, out, lse)
        return {"out": out, "lse": lse}

    def run_extend(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """All rows in one call."""
        out, _ = self._outputs(buffers, "out", "unused")
        starts = torch.tensor([0, *accumulate(self.shape.queries)], dtype=torch.int32)
        seq_lens = torch.tensor(self.shape.seq_lens, dtype=torch.int32)
        fn(*self._operands(buffers), starts, seq_lens, self.scale, out)
        return {"out": out}

    def split_extend(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """Every query in a call of its own, as if the chunk had ended with it."""
        q_latent, q_rope, cache, tables = self._operands(buffers)
        out, _ = self._outputs(buffers, "out", "unused")
        starts = torch.tensor([0, 1], dtype=torch.int32)
        for row, place, length in self._single_queries():
            one, seq_lens = slice(place, place + 1), torch.tensor([length], dtype=torch.int32)
            fn(q_latent[one], q_rope[one], cache, tables[row : row + 1], starts, seq_lens, self.scale, out[one])
        return {"out": out}

    def _outputs(self, buffers: Buffers, out: str, lse: str, splits: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*([splits] if splits else []), *self.q.shape[:2])
        return buffers.output(out, (*shape, self.shape.latent), _FLOAT32), buffers.output(lse, shape, _FLOAT32)

    def _single_queries(self) -> Iterator[tuple[int, int, int]]:
        """Row, place among the queries, and the row's length up to the query."""
        place = 0
        for row, (count, seq_len) in enumerate(zip(self.shape.queries, self.shape.seq_lens, strict=True)):
            for index in range(count):
                yield row, place + index, max(0, seq_len - count + index + 1)
            place += count

    def _exact_row(self, row: int, queries: torch.Tensor, part: tuple[int, int]) -> Attention:
        count, seq_len = self.shape.queries[row], self.shape.seq_lens[row]
        keys = self.pages.positions(row, 0, self.shape.latent + self.shape.rotary, *part)
        positions = torch.arange(seq_len - count, seq_len)
        rules = ScoreRules(self.scale)
        values, rounding = keys[..., : self.shape.latent], roundoff_of(self.activations)
        return exact_attention(queries, positions, keys, values, part[0], rules, rounding)

    def _exact(self, parts: Sequence[tuple[int, int]], out: Attention) -> None:
        """Fills ``out`` with one row's part each."""
        place = 0
        for row, (count, part) in enumerate(zip(self.shape.queries, parts, strict=True)):
            here = slice(place, place + count)
            exact = self._exact_row(row, self.q[here], part)
            for whole, found in zip(vars(out).values(), vars(exact).values(), strict=True):
                whole[here] = found
            place += count

    def expect(self, splits: int = 0, lse: bool = True) -> dict[str, Expectation]:
        """The truth of all rows whole (splits 0), or of every split of them."""
        rows, heads = self.q.shape[:2]
        shape = (max(1, splits), rows, heads)
        wide = (*shape, self.shape.latent)
        value, found_lse = (torch.full(s, torch.nan, dtype=torch.float64) for s in (wide, shape))
        whole = Attention(value, torch.zeros_like(value), found_lse, torch.zeros_like(found_lse))
        for split in range(shape[0]):
            parts = [split_part(n, self.shape.granularity, split, shape[0]) for n in self.shape.seq_lens]
            self._exact(parts, Attention(*(tensor[split] for tensor in vars(whole).values())))
        if not splits:
            whole = Attention(*(tensor[0] for tensor in vars(whole).values()))
        out = Close(whole.out, whole.out_bound)
        if not lse:
            return {"out": out}
        more: dict[str, Expectation] = {} if splits else {"out without lse": out}
        return {"out": out, "lse": Close(whole.lse, whole.lse_bound), **more}


def split_part(seq_len: int, granularity: int, split: int, splits: int) -> tuple[int, int]:
    """The positions [start, stop) of a row that a split takes."""
    pages = (seq_len + granularity - 1) // granularity
    share = (pages + splits - 1) // splits * granularity
    return min(split * share, seq_len), min((split + 1) * share, seq_len)


def _inputs(shape: LatentShape, spare: int, dtype: torch.dtype, generator: torch.Generator) -> LatentReads:
    width = shape.latent + shape.rotary
    field = (1, 1, shape.granularity, width)
    pages = scatter_pages(field, shape.seq_lens, [0] * len(shape.seq_lens), dtype, generator)
    q = torch.randn(sum(shape.queries) + spare, shape.heads, width, generator=generator)
    return LatentReads(shape, spare, q, pages, 1.5 * width**-0.5)


def _large_offsets(dtype: torch.dtype, generator: torch.Generator) -> LatentReads | None:
    """A cache whose blocks lie more than 2^31 bytes apart; None where memory forbids it."""
    pages = far_pages((1, 1, 16, 64), dtype, generator)
    if pages is None:
        return None
    shape = LatentShape("large offsets", 2, 48, 16, 16, (1,), (30,))
    return LatentReads(shape, 0, torch.randn(1, 2, 64, generator=generator), pages, 0.2)


_DECODE_SHAPES = (
    LatentShape("the sizes of DeepSeek", 16, 512, 64, 64, (1, 1), (130, 64)),
    LatentShape("no rows", 4, 32, 8, 16, (), ()),
    LatentShape("empty, short and long rows", 4, 64, 16, 32, (1,) * 4, (0, 1, 33, 500)),
    LatentShape("one token a page, odd sizes", 3, 31, 6, 1, (1, 1), (9, 1)),
    LatentShape("four queries a row, more than positions", 8, 64, 16, 16, (4,) * 3, (100, 4, 3)),
)
_EXTEND_SHAPES = (
    LatentShape("the sizes of DeepSeek", 8, 512, 64, 64, (33,), (130,)),
    LatentShape("no rows", 4, 32, 8, 16, (), ()),
    LatentShape(
        "with and without a prefix, rows without queries", 4, 64, 16, 32, (7, 0, 0, 1, 40), (7, 0, 9, 130, 200)
    ),
    LatentShape("more queries than positions", 3, 31, 6, 1, (4, 2), (3, 9)),
)


def _variants(reads: LatentReads) -> Iterator[tuple[str, dict[str, TraitValue], LatentReads]]:
    """Name, traits and inputs: over a cache of bfloat16 or 8 bits once more for kernels that may round."""
    shape = reads.shape
    traits: dict[str, TraitValue] = {
        "latent_dim": shape.latent,
        "rotary_dim": shape.rotary,
        "kernel_page_size": shape.granularity,
    }
    yield shape.name, traits, reads
    if may_round(reads.pages.arena.dtype):
        rounded = replace(reads, activations="bfloat16")
        yield f"{shape.name}, rounded", {**traits, "activations": "bfloat16"}, rounded


def decode_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Rows of every length, empty ones, several queries a row, odd sizes, far blocks; with and without lse."""
    dtype = kv_dtype(signature)
    inputs = [_inputs(shape, 0, dtype, generator) for shape in _DECODE_SHAPES]
    if dtype is torch.float16:
        inputs += [large for large in (_large_offsets(dtype, generator),) if large is not None]
    for inputs_of_case in inputs:
        for name, traits, reads in _variants(inputs_of_case):
            yield Case(name, traits, reads.run_decode, reads.expect, split=reads.split_decode)


def decode_partial_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """One split, as many as pages, more than pages: the rest must be zeros and -inf, exactly."""
    for shape in _DECODE_SHAPES:
        for name, traits, reads in _variants(_inputs(shape, 0, kv_dtype(signature), generator)):
            for splits in (1, 3, 8):
                yield Case(
                    f"{name}, {splits} splits",
                    traits,
                    partial(reads.run_partial, splits=splits),
                    partial(reads.expect, splits=splits),
                )


def extend_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Chunks with and without a prefix, rows without queries, rows of q and out that belong to nobody."""
    for shape in _EXTEND_SHAPES:
        for name, traits, reads in _variants(_inputs(shape, 2, kv_dtype(signature), generator)):
            expect = partial(reads.expect, lse=False)
            yield Case(name, traits, reads.run_extend, expect, split=reads.split_extend)


_SLOW_SHAPES = (
    LatentShape("all heads of DeepSeek-V3, long", 128, 512, 64, 64, (2, 2), (4100, 700)),
    LatentShape("many rows", 16, 512, 64, 64, (1,) * 33, tuple(range(0, 330, 10))),
)


def slow_decode_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Many heads, long rows, many rows."""
    for shape in _SLOW_SHAPES:
        for name, traits, reads in _variants(_inputs(shape, 0, kv_dtype(signature), generator)):
            yield Case(name, traits, reads.run_decode, reads.expect, split=reads.split_decode)


# ---------------------------------------------------------------- merging


def _merge_truth(partials: torch.Tensor, lse: torch.Tensor) -> tuple[Close, Close]:
    """Float64 of out and lse; a part that is alone is exact."""
    wide = lse.double()
    total = torch.logsumexp(wide, dim=0)
    empty = torch.isneginf(total)
    weights = torch.exp(wide - torch.where(empty, 0.0, total))
    used = torch.where((weights > 0.0).unsqueeze(-1), partials.double(), 0.0)
    out = (weights.unsqueeze(-1) * used).sum(dim=0)
    # a difference of lse is rounded once, and its error is the relative error of the weight
    spread = torch.where(weights > 0.0, wide - torch.where(empty, 0.0, total), 0.0).abs()
    relative = ROUNDOFF * (spread + 4.0 * lse.shape[0] + 24.0)
    bound = (relative.unsqueeze(-1) * weights.unsqueeze(-1) * used.abs()).sum(dim=0)
    alone = (wide > -torch.inf).sum(dim=0) <= 1
    lse_bound = torch.where(alone, 0.0, ROUNDOFF * (24.0 + 4.0 * torch.where(empty, 0.0, total).abs()))
    return Close(out, torch.where(alone.unsqueeze(-1), 0.0, bound)), Close(total, lse_bound)


def _merge_case(name: str, partials: torch.Tensor, lse: torch.Tensor) -> Case:
    _, rows, heads, width = partials.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        shape = (rows, heads, width)
        out, total = buffers.output("out", shape, _FLOAT32), buffers.output("lse", shape[:2], _FLOAT32)
        alone = buffers.output("out without lse", shape, _FLOAT32)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            held = buffers.read_only("partials", partials[:, part]), buffers.read_only("partial_lse", lse[:, part])
            fn(*held, out[part], total[part])
            fn(*held, alone[part], None)
        return {"out": out, "lse": total, "out without lse": alone}

    def expect() -> dict[str, Expectation]:
        out, total = _merge_truth(partials, lse)
        return {"out": out, "lse": total, "out without lse": out}

    traits = {"head_dim": width}
    return Case(name, traits, partial(run, step=rows), expect, split=partial(run, step=1))


def merge_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """One part, equal and very unequal parts, empty ones (whose partials are NaN) in any place, only empty ones, one
    that is alone, no rows."""
    for name, parts, rows, heads, width in (
        ("one part", 1, 3, 2, 64),
        ("no rows", 3, 0, 2, 32),
        ("seven parts", 7, 5, 4, 512),
        ("odd sizes", 2, 1, 3, 37),
    ):
        partials = torch.randn(parts, rows, heads, width, generator=generator)
        yield _merge_case(name, partials, torch.randn(parts, rows, heads, generator=generator) * 3.0)
    partials = torch.randn(5, 6, 2, 48, generator=generator)
    lse = torch.randn(5, 6, 2, generator=generator) * torch.tensor([1.0, 10.0, 40.0, 150.0, 1.0, 1.0]).reshape(1, 6, 1)
    lse[1:, 4] = -torch.inf  # alone
    lse[:, 5] = -torch.inf  # nothing at all
    lse[2, 0] = lse[0, 1] = lse[4, 2] = -torch.inf
    partials[torch.isneginf(lse)] = torch.nan
    yield _merge_case("empty parts", partials, lse)


register_cases("attention.mla_decode", decode_cases, slow_decode_cases)
register_cases("attention.mla_decode_partial", decode_partial_cases)
register_cases("attention.mla_extend", extend_cases)
register_cases("attention.merge_partials", merge_cases)
