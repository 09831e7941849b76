"""Cases of attention.gqa_prologue, attention.decode and attention.extend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from tokenspeed_kernel.numerics.cases import (
    UNIT_ROUNDOFF,
    Buffers,
    Case,
    Close,
    Exact,
    Expectation,
    Outputs,
    register_cases,
)
from tokenspeed_kernel.numerics.elementwise_cases import exact_rms
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FLOAT32 = torch.float32
_ROUNDOFF = UNIT_ROUNDOFF[_FLOAT32]
_UNREAD = -0x70000000  # a page table entry that leads far outside the cache


@dataclass(frozen=True)
class Heads:
    """kv heads, query heads per KV head, elements of a head."""

    kv: int
    per_kv: int
    dim: int

    @property
    def query(self) -> int:
        return self.kv * self.per_kv


def kv_dtype(signature: FormatSignature) -> torch.dtype:
    """The torch dtype of a signature's cache."""
    dtype: torch.dtype = getattr(torch, signature["kv"].storage_dtype)
    return dtype


def _split_arena(arena: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The k and v views [blocks, heads, g, D] of an arena [blocks, 2, heads, g, D]."""
    return arena[:, 0], arena[:, 1]


# ---------------------------------------------------------------- prologue


@dataclass(frozen=True)
class PrologueInputs:
    """One call of the prologue; qkv float32 [T, query + 2 kv heads, D]."""

    heads: Heads
    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    slots: torch.Tensor
    arena_shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    eps: float = 1e-6

    def run(self, fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        """Calls the kernel on ``step`` rows at a time."""
        heads = self.heads
        arena = buffers.output("arena", self.arena_shape, self.dtype)
        k_cache, v_cache = _split_arena(arena)
        held = buffers.writable("qkv", self.qkv)
        q, k, v = torch.split(held, [heads.query, heads.kv, heads.kv], dim=1)
        positions, slots = buffers.read_only("positions", self.positions), buffers.read_only("slots", self.slots)
        cos_sin = buffers.read_only("cos_sin", self.cos_sin)
        norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if self.norms is not None:
            norms = (buffers.read_only("q_norm", self.norms[0]), buffers.read_only("k_norm", self.norms[1]))
        for start in range(0, max(1, q.shape[0]), max(1, step)):
            part = slice(start, start + step)
            row = (q[part], k[part], v[part], positions[part], cos_sin, *norms, self.eps, k_cache, v_cache, slots[part])
            fn(*row)
        # block 0 takes the padding, in any order: nobody reads it and nothing is expected of it
        return {"q": q.clone(), "k_cache": k_cache[1:].clone(), "v_cache": v_cache[1:].clone()}

    def _rotated(self, x: torch.Tensor, norm: torch.Tensor | None) -> Close:
        wide, error = x.double(), torch.zeros_like(x, dtype=torch.float64)
        if norm is not None:
            normed = exact_rms(x, norm, self.eps)
            wide, error = normed.value, normed.bound
        half = x.shape[-1] // 2
        angles = self.cos_sin.double()[self.positions.long()].unsqueeze(1)
        cos, sin = angles[..., :half], angles[..., half:]
        low, high = wide[..., :half], wide[..., half:]
        value = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        size = torch.cat([(low * cos).abs() + (high * sin).abs(), (high * cos).abs() + (low * sin).abs()], dim=-1)
        crossed = error[..., :half] + error[..., half:]
        return Close(value, 4.0 * _ROUNDOFF * size + torch.cat([crossed, crossed], dim=-1))

    def expect(self) -> dict[str, Expectation]:
        q, k, v = torch.split(self.qkv, [self.heads.query, self.heads.kv, self.heads.kv], dim=1)
        q_norm, k_norm = self.norms if self.norms is not None else (None, None)
        rotated = self._rotated(k, k_norm)
        bound = rotated.bound
        if self.dtype is not _FLOAT32:  # rounding to the cache's dtype; below its normal numbers the step is constant
            bound = bound + UNIT_ROUNDOFF[self.dtype] * (rotated.value.abs() + bound) + 2.0**-25
        blocks, _, heads, granularity, width = self.arena_shape
        k_value = torch.full((blocks, heads, granularity, width), torch.nan, dtype=torch.float64)
        k_bound, v_value = torch.zeros_like(k_value), k_value.to(self.dtype)
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= granularity:
                place = (slot // granularity, slice(None), slot % granularity)
                k_value[place], k_bound[place] = rotated.value[token], bound[token]
                v_value[place] = v[token].to(self.dtype)
        return {
            "q": self._rotated(q, q_norm),
            "k_cache": Close(k_value[1:], k_bound[1:]),
            "v_cache": Exact(v_value[1:]),
        }


def prologue_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """With and without head norms, several head sizes and ratios, no tokens, padding, scattered slots, large
    positions."""
    for heads, tokens, granularity in (
        (Heads(3, 3, 64), 5, 64),
        (Heads(1, 1, 32), 0, 16),
        (Heads(2, 4, 128), 9, 32),
        (Heads(1, 7, 64), 1, 1),
        (Heads(2, 2, 80), 33, 16),
        (Heads(4, 1, 16), 6, 8),
    ):
        for qk_norm in (False, True):
            blocks = tokens + 3
            order = torch.randperm((blocks - 1) * granularity, generator=generator)[:tokens] + granularity
            if tokens > 3:  # two padded tokens: below 0, and inside block 0
                order[1], order[tokens - 1] = -1, min(3, granularity - 1)
            positions = torch.randint(0, 4000, (tokens,), generator=generator, dtype=torch.int32)
            frequency = 10000.0 ** (-torch.arange(0, heads.dim, 2, dtype=torch.float64) / heads.dim)
            angles = torch.outer(torch.arange(4000, dtype=torch.float64), frequency)
            weights = torch.randn(2, heads.dim, generator=generator)
            inputs = PrologueInputs(
                heads=heads,
                qkv=torch.randn(tokens, heads.query + 2 * heads.kv, heads.dim, generator=generator),
                positions=positions,
                cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1).float(),
                norms=(weights[0], weights[1]) if qk_norm else None,
                slots=order.to(torch.int64),
                arena_shape=(blocks, 2, heads.kv, granularity, heads.dim),
                dtype=kv_dtype(signature),
            )
            yield Case(
                f"{tokens} tokens, {heads}, g {granularity}{', head norms' if qk_norm else ''}",
                {"head_dim": heads.dim, "q_per_kv": heads.per_kv, "qk_norm": qk_norm},
                partial(inputs.run, step=tokens),
                inputs.expect,
                split=partial(inputs.run, step=1),
            )


# ---------------------------------------------------------------- decode and extend


@dataclass(frozen=True)
class ReadInputs:
    """One call of decode or extend.

    Attributes:
        queries: how many of each row.
        window: positions that a query sees, 0 for all.
        spare: rows of q and out that belong to no row.
        qkv: float32 [T + spare, query + 2 kv heads, D]; the queries are a view of it, as in a model.
        k_cache, v_cache: NaN wherever no position lies that a query of its row sees.
        tables: int32 [B, pages], unread entries lead nowhere.
    """

    heads: Heads
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    window: int
    spare: int
    qkv: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.heads.dim**-0.5)

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
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        if mode == "decode":
            fn(q, self.k_cache, self.v_cache, tables, seq_lens, self.scale, self.window, out)
            return
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        fn(q, self.k_cache, self.v_cache, tables, starts, seq_lens, self.scale, self.window, out)

    def _buffers(self, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = buffers.read_only("qkv", self.qkv)[:, : self.heads.query]
        out = buffers.output("out", (self.qkv.shape[0], self.heads.query, self.heads.dim), _FLOAT32)
        tables = buffers.read_only("page_table", torch.nn.functional.pad(self.tables, (0, 5), value=_UNREAD))
        return q, out, tables[:, : self.tables.shape[1]]

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
        shape = (self.qkv.shape[0], self.heads.query, self.heads.dim)
        value = torch.full(shape, torch.nan, dtype=torch.float64)
        bound = torch.zeros(shape, dtype=torch.float64)
        start = 0
        for row, (count, seq_len) in enumerate(zip(self.queries, self.seq_lens, strict=True)):
            for index in range(count):
                value[start + index] = 0.0
                position = seq_len - count + index
                if position >= 0:
                    query = self.qkv[start + index, : self.heads.query]
                    value[start + index], bound[start + index] = self._attention(row, query, position)
            start += count
        return {"out": Close(value, bound)}

    def _attention(self, row: int, query: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 attention of one token's heads over the positions it sees, and the error that float32 may make."""
        granularity = self.k_cache.shape[2]
        places = torch.arange(first_seen(position, self.window), position + 1)
        blocks, offsets = self.tables[row].long()[places // granularity], places % granularity
        repeat = self.heads.per_kv
        keys = self.k_cache[blocks, :, offsets].double().repeat_interleave(repeat, dim=1)  # [L, heads, D]
        values = self.v_cache[blocks, :, offsets].double().repeat_interleave(repeat, dim=1)
        scores = torch.einsum("hd,lhd->hl", query.double(), keys) * self.scale
        weights = torch.softmax(scores, dim=-1)
        size = torch.einsum("hd,lhd->hl", query.double().abs(), keys.abs()) * self.scale
        score_error = _ROUNDOFF * ((self.heads.dim**0.5 + 8.0) * size.amax(dim=-1) + 2.0 * scores.abs().amax(dim=-1))
        relative = 2.0 * score_error + _ROUNDOFF * (len(places) ** 0.5 + 48.0)
        result = torch.einsum("hl,lhd->hd", weights, values)
        return result, relative.unsqueeze(1) * torch.einsum("hl,lhd->hd", weights, values.abs())


def first_seen(position: int, window: int) -> int:
    """The first position that the query at ``position`` sees."""
    return max(0, position - window + 1) if window else 0


@dataclass(frozen=True)
class ReadShape:
    """What a case of decode or extend is about; see ReadInputs."""

    name: str
    heads: Heads
    granularity: int
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    window: int = 0


def _read_inputs(shape: ReadShape, spare: int, dtype: torch.dtype, generator: torch.Generator) -> ReadInputs:
    """Random queries; scattered blocks; NaN wherever no query sees a position, table entries that lead nowhere before
    a window."""
    heads, granularity = shape.heads, shape.granularity
    pages = [(length + granularity - 1) // granularity for length in shape.seq_lens]
    order = (torch.randperm(sum(pages) + 2, generator=generator) + 1).to(torch.int32)
    arena = torch.full((sum(pages) + 3, 2, heads.kv, granularity, heads.dim), torch.nan, dtype=dtype)
    tables = torch.full((len(pages), max([1, *pages])), _UNREAD, dtype=torch.int32)
    taken = 0
    for row, (count, length, queries) in enumerate(zip(pages, shape.seq_lens, shape.queries, strict=True)):
        first = first_seen(length - queries, shape.window)
        first_page = first // granularity
        tables[row, first_page:count] = order[taken + first_page : taken + count]
        for page, block in enumerate(tables[row, first_page:count].tolist(), first_page):
            rows = slice(max(0, first - page * granularity), min(granularity, length - page * granularity))
            fresh = torch.randn(2, heads.kv, rows.stop - rows.start, heads.dim, generator=generator)
            arena[block, :, :, rows] = fresh.to(dtype)
        taken += count
    tokens = sum(shape.queries) + spare
    qkv = torch.randn(tokens, heads.query + 2 * heads.kv, heads.dim, generator=generator) * 2.0
    k_cache, v_cache = _split_arena(arena)
    return ReadInputs(heads, shape.queries, shape.seq_lens, shape.window, spare, qkv, k_cache, v_cache, tables)


def _read_case(name: str, mode: str, inputs: ReadInputs) -> Case:
    traits: dict[str, TraitValue] = {
        "head_dim": inputs.heads.dim,
        "q_per_kv": inputs.heads.per_kv,
        "kernel_page_size": inputs.k_cache.shape[2],
        "causal": True,
        "windowed": inputs.window > 0,
    }
    return Case(
        name,
        traits,
        partial(inputs.run, mode=mode),
        inputs.expect,
        split=partial(inputs.run_split, mode=mode),
    )


def _large_offsets(mode: str, dtype: torch.dtype, generator: torch.Generator) -> Case | None:
    """A cache whose blocks lie more than 2^31 bytes apart, a few pages of it touched; None where memory forbids it."""
    heads, granularity = Heads(1, 2, 64), 16
    stride = (1 << 30) + 64
    total = 2 * stride + 2 * granularity * heads.dim
    if current_platform().memory_bytes < total * dtype.itemsize:
        return None
    try:
        storage = torch.empty(total, dtype=dtype)
    except RuntimeError:
        return None
    arena = storage.as_strided(
        (3, 2, heads.kv, granularity, heads.dim),
        (stride, granularity * heads.dim, granularity * heads.dim, heads.dim, 1),
    )
    arena[1:] = torch.randn(2, 2, heads.kv, granularity, heads.dim, generator=generator).to(dtype)
    k_cache, v_cache = _split_arena(arena)
    qkv = torch.randn(2, heads.query + 2 * heads.kv, heads.dim, generator=generator)
    tables = torch.tensor([[2, 1]], dtype=torch.int32)
    return _read_case("large offsets", mode, ReadInputs(heads, (2,), (30,), 0, 0, qkv, k_cache, v_cache, tables))


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
)


def _read_cases(mode: str, signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    dtype = kv_dtype(signature)
    for shape in _DECODE_SHAPES if mode == "decode" else _EXTEND_SHAPES:
        inputs = _read_inputs(shape, 2 if mode == "extend" else 0, dtype, generator)
        yield _read_case(shape.name, mode, inputs)
    if dtype is torch.float16:
        large = _large_offsets(mode, dtype, generator)
        if large is not None:
            yield large


def decode_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Rows of every length, empty ones, several queries a row, small and odd pages and heads, far blocks, windows."""
    return _read_cases("decode", signature, generator)


def extend_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Chunks with and without a prefix, rows without queries, rows of q and out that belong to nobody, windows."""
    return _read_cases("extend", signature, generator)


register_cases("attention.gqa_prologue", prologue_cases)
register_cases("attention.decode", decode_cases)
register_cases("attention.extend", extend_cases)
