"""Cases of attention.decode and attention.extend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from tokenspeed_kernel.numerics.cases import Buffers, Case, Close, Expectation, Outputs, register_cases
from tokenspeed_kernel.numerics.paged import (
    UNREAD,
    Pages,
    exact_attention,
    far_pages,
    first_seen,
    kv_dtype,
    may_round,
    roundoff_of,
    scatter_pages,
)
from tokenspeed_kernel.numerics.prologue_cases import Heads
from tokenspeed_kernel.ops.paged_reference import ScoreRules
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FLOAT32 = torch.float32


@dataclass(frozen=True)
class ReadInputs:
    """One call of decode or extend.

    Attributes:
        queries: how many of each row.
        rules: scale, window, soft cap and sinks.
        spare: rows of q and out that belong to no row.
        qkv: float32 [T + spare, query + 2 kv heads, D]; the queries are a view of it, as in a model.
        pages: the cache, its fields k and v, and the page tables.
        activations: what may be rounded.
    """

    heads: Heads
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    rules: ScoreRules
    spare: int
    qkv: torch.Tensor
    pages: Pages
    activations: str = "float32"

    @property
    def capped_or_sunk(self) -> bool:
        """Whether the call has the two arguments behind out."""
        return self.rules.sinks is not None or self.rules.soft_cap > 0.0

    def _call(
        self,
        fn: KernelFunction,
        mode: str,
        counts: Sequence[int],
        lengths: Sequence[int],
        q: torch.Tensor,
        out: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        """Calls the kernel for as many rows as there are ``lengths``."""
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        rows = () if mode == "decode" else (starts,)
        more = (self.rules.sinks, self.rules.soft_cap) if self.capped_or_sunk else ()
        k_cache, v_cache = self.pages.arena[:, 0], self.pages.arena[:, 1]
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        fn(q, k_cache, v_cache, tables, *rows, seq_lens, self.rules.scale, self.rules.window, out, *more)

    def _buffers(self, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = buffers.read_only("qkv", self.qkv)[:, : self.heads.query]
        out = buffers.output("out", (self.qkv.shape[0], self.heads.query, self.heads.dim), _FLOAT32)
        tables = buffers.read_only("page_table", torch.nn.functional.pad(self.pages.tables, (0, 5), value=UNREAD))
        return q, out, tables[:, : self.pages.tables.shape[1]]

    def run(self, fn: KernelFunction, buffers: Buffers, mode: str) -> Outputs:
        """All rows in one call."""
        q, out, tables = self._buffers(buffers)
        used = q.shape[0] - self.spare if mode == "decode" else q.shape[0]
        self._call(fn, mode, self.queries, self.seq_lens, q[:used], out[:used], tables)
        return {"out": out}

    def run_split(self, fn: KernelFunction, buffers: Buffers, mode: str) -> Outputs:
        """Every query in a call of its own, as if the chunk had ended with it."""
        q, out, tables = self._buffers(buffers)
        start = 0
        for row, (count, seq_len) in enumerate(zip(self.queries, self.seq_lens, strict=True)):
            for index in range(count):
                place = slice(start + index, start + index + 1)
                length = max(0, seq_len - count + index + 1)
                self._call(fn, mode, [1], [length], q[place], out[place], tables[row : row + 1])
            start += count
        return {"out": out}

    def expect(self) -> dict[str, Expectation]:
        value = torch.full((self.qkv.shape[0], self.heads.query, self.heads.dim), torch.nan, dtype=torch.float64)
        bound, start, width = torch.zeros_like(value), 0, self.heads.dim
        rounding = roundoff_of(self.activations)
        for row, (count, seq_len) in enumerate(zip(self.queries, self.seq_lens, strict=True)):
            here, first = slice(start, start + count), first_seen(seq_len - count, self.rules.window)
            keys, values = (self.pages.positions(row, field, width, first, seq_len) for field in (0, 1))
            positions = torch.arange(seq_len - count, seq_len)
            q = self.qkv[here, : self.heads.query]
            exact = exact_attention(q, positions, keys, values, first, self.rules, rounding)
            value[here], bound[here] = exact.out, exact.out_bound
            start += count
        return {"out": Close(value, bound)}


@dataclass(frozen=True)
class ReadShape:
    """What a case of decode or extend is about; see ReadInputs."""

    name: str
    heads: Heads
    granularity: int
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


def _read_inputs(shape: ReadShape, spare: int, dtype: torch.dtype, generator: torch.Generator) -> ReadInputs:
    """Random queries; scattered blocks; NaN wherever no query sees a position, table entries that lead nowhere before
    a window."""
    heads = shape.heads
    firsts = [first_seen(n - queries, shape.window) for n, queries in zip(shape.seq_lens, shape.queries, strict=True)]
    pages = scatter_pages((2, heads.kv, shape.granularity, heads.dim), shape.seq_lens, firsts, dtype, generator)
    tokens = sum(shape.queries) + spare
    qkv = torch.randn(tokens, heads.query + 2 * heads.kv, heads.dim, generator=generator) * 2.0
    sinks = torch.randn(heads.query, generator=generator) * 3.0 if shape.sinks else None
    rules = ScoreRules(heads.dim**-0.5, shape.window, shape.soft_cap, sinks)
    return ReadInputs(heads, shape.queries, shape.seq_lens, rules, spare, qkv, pages)


def _read_case(name: str, mode: str, inputs: ReadInputs) -> Case:
    traits: dict[str, TraitValue] = {
        "head_dim": inputs.heads.dim,
        "q_per_kv": inputs.heads.per_kv,
        "kernel_page_size": inputs.pages.arena.shape[3],
        "causal": True,
        "windowed": inputs.rules.window > 0,
        "sinks": inputs.rules.sinks is not None,
        "soft_cap": inputs.rules.soft_cap > 0.0,
        "activations": inputs.activations,
    }
    return Case(
        name,
        traits,
        partial(inputs.run, mode=mode),
        inputs.expect,
        split=partial(inputs.run_split, mode=mode),
    )


def _large_offsets(mode: str, dtype: torch.dtype, generator: torch.Generator) -> Case | None:
    """A cache whose blocks lie more than 2^31 bytes apart; None where memory forbids it."""
    heads = Heads(1, 2, 64)
    pages = far_pages((2, heads.kv, 16, heads.dim), dtype, generator)
    if pages is None:
        return None
    qkv = torch.randn(2, heads.query + 2 * heads.kv, heads.dim, generator=generator)
    return _read_case("large offsets", mode, ReadInputs(heads, (2,), (30,), ScoreRules(0.125), 0, qkv, pages))


_DECODE_SHAPES = (  # the same number of queries in every row
    ReadShape("one row", Heads(3, 3, 64), 64, (1,), (5,)),
    ReadShape("no rows", Heads(1, 2, 32), 16, (), ()),
    ReadShape("empty, short and long rows", Heads(3, 3, 64), 64, (1,) * 5, (0, 1, 64, 65, 300)),
    ReadShape("small pages", Heads(2, 4, 128), 16, (1, 1), (130, 17)),
    ReadShape("one token a page", Heads(1, 1, 16), 1, (1, 1), (9, 1)),
    ReadShape("odd head size", Heads(2, 2, 80), 32, (1, 1, 1), (33, 32, 31)),
    ReadShape("three queries a row", Heads(1, 7, 64), 32, (3, 3, 3), (70, 3, 2)),
    ReadShape("long", Heads(1, 3, 64), 64, (1,), (2100,)),
    ReadShape("window, rows within and beyond it", Heads(3, 3, 64), 16, (1,) * 6, (0, 1, 37, 38, 300, 700), 37),
    ReadShape("window of one position", Heads(2, 2, 80), 32, (1, 1), (33, 1), 1),
    ReadShape("window, three queries a row", Heads(1, 7, 64), 32, (3, 3, 3), (70, 3, 2), 33),
    ReadShape("window over a long row", Heads(1, 3, 64), 64, (1, 1), (2100, 1030), 600),
    ReadShape("sinks", Heads(2, 4, 64), 16, (1,) * 4, (0, 1, 40, 170), sinks=True),
    ReadShape("sinks and a window", Heads(2, 2, 64), 16, (2, 2), (150, 1), 32, sinks=True),
    ReadShape("soft cap", Heads(2, 2, 80), 32, (1, 1, 1), (0, 1, 150), soft_cap=3.0),
    ReadShape("soft cap, sinks and a window", Heads(1, 3, 48), 8, (1, 1), (90, 5), 17, 50.0, True),
)

_EXTEND_SHAPES = (
    ReadShape("one row", Heads(3, 3, 64), 64, (5,), (5,)),
    ReadShape("no rows", Heads(1, 2, 32), 16, (), ()),
    ReadShape("empty rows and rows without queries", Heads(3, 3, 64), 64, (7, 0, 0, 1, 70), (7, 0, 9, 130, 200)),
    ReadShape("small pages", Heads(2, 4, 128), 16, (33, 2), (40, 35)),
    ReadShape("one token a page", Heads(1, 1, 16), 1, (4, 1), (9, 1)),
    ReadShape("odd head size", Heads(2, 2, 80), 32, (3, 32), (33, 32)),
    ReadShape("more queries than positions", Heads(1, 7, 64), 32, (4,), (3,)),
    ReadShape("long", Heads(1, 3, 64), 64, (9,), (1100,)),
    ReadShape("window, shorter than the chunk", Heads(3, 3, 64), 16, (70, 0, 1, 40), (200, 9, 130, 40), 19),
    ReadShape("window, longer than the chunk", Heads(2, 2, 80), 32, (3, 9), (150, 9), 100),
    ReadShape("window, more queries than positions", Heads(1, 7, 64), 32, (4,), (3,), 2),
    ReadShape("window over a long row", Heads(1, 3, 64), 64, (90,), (1100,), 560),
    ReadShape("sinks", Heads(2, 4, 64), 16, (7, 0, 4, 20), (7, 9, 3, 130), sinks=True),
    ReadShape("sinks and a window", Heads(2, 2, 64), 16, (40, 1), (150, 9), 32, sinks=True),
    ReadShape("soft cap", Heads(2, 2, 80), 32, (9, 1), (150, 1), soft_cap=3.0),
    ReadShape("soft cap, sinks and a window", Heads(1, 3, 48), 8, (30, 5), (90, 5), 17, 50.0, True),
)


def _read_cases(mode: str, signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    dtype = kv_dtype(signature)
    for shape in _DECODE_SHAPES if mode == "decode" else _EXTEND_SHAPES:
        inputs = _read_inputs(shape, 2 if mode == "extend" else 0, dtype, generator)
        yield _read_case(shape.name, mode, inputs)
        if may_round(dtype):
            yield _read_case(f"{shape.name}, rounded", mode, replace(inputs, activations="bfloat16"))
    if dtype is torch.float16:
        large = _large_offsets(mode, dtype, generator)
        if large is not None:
            yield large


# Rows so long, and so many, that a kernel takes every path of its splits, tiles and threads.
_SLOW_SHAPES = (
    ReadShape("a very long row", Heads(2, 4, 128), 64, (1,), (17000,)),
    ReadShape("a very long row, window", Heads(1, 3, 64), 16, (1,), (17000,), 5000),
    ReadShape("many rows", Heads(2, 3, 64), 16, (1,) * 130, tuple(range(0, 1300, 10))),
    ReadShape("many rows, sinks", Heads(8, 8, 64), 16, (1,) * 33, tuple(range(1, 331, 10)), 128, 0.0, True),
)
_SLOW_CHUNKS = (
    ReadShape("a long chunk behind a long prefix", Heads(1, 4, 128), 64, (257,), (4300,)),
    ReadShape("a long chunk, window", Heads(2, 2, 64), 32, (700,), (1500,), 333),
    ReadShape("many rows", Heads(2, 3, 64), 16, tuple(range(60)), tuple(range(0, 600, 10))),
)


def _slow_cases(
    shapes: Sequence[ReadShape], mode: str, signature: FormatSignature, generator: torch.Generator
) -> Iterator[Case]:
    for shape in shapes:
        inputs = _read_inputs(shape, 0, kv_dtype(signature), generator)
        yield _read_case(shape.name, mode, inputs)
        if may_round(kv_dtype(signature)):
            yield _read_case(f"{shape.name}, rounded", mode, replace(inputs, activations="bfloat16"))


def decode_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Rows of every length, empty ones, several queries a row, small and odd pages and heads, far blocks, windows,
    sinks, soft caps."""
    return _read_cases("decode", signature, generator)


def extend_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Chunks with and without a prefix, rows without queries, rows of q and out that belong to nobody, windows,
    sinks, soft caps."""
    return _read_cases("extend", signature, generator)


register_cases("attention.decode", decode_cases, partial(_slow_cases, _SLOW_SHAPES, "decode"))
register_cases("attention.extend", extend_cases, partial(_slow_cases, _SLOW_CHUNKS, "extend"))
