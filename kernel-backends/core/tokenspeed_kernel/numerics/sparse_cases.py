"""Cases of attention.index_prologue, index_select and mla_selected."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from tokenspeed_kernel.numerics.cases import Buffers, Case, Close, Exact, Expectation, Outputs, register_cases
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
from tokenspeed_kernel.numerics.prologue_cases import exact_rotary, random_slots, random_table
from tokenspeed_kernel.numerics.stored import stored
from tokenspeed_kernel.ops.paged_reference import ScoreRules
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FLOAT32 = torch.float32
_SPARE = 2  # rows of every operand and output that belong to no row


def _rows(queries: Sequence[int]) -> list[tuple[int, int, int]]:
    """Row, place among the queries, and how many of the row's queries stand behind it, of every query."""
    starts = [0, *accumulate(queries)]
    return [
        (row, starts[row] + index, count - 1 - index) for row, count in enumerate(queries) for index in range(count)
    ]


# ---------------------------------------------------------------- prologue


@dataclass(frozen=True)
class IndexPrologue:
    """One call; q float32 [T, Hi, D + 3], key [T, D + 3], of which the last 3 are another's."""

    q: torch.Tensor
    key: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    norm: torch.Tensor
    slots: torch.Tensor
    cache_shape: tuple[int, int, int, int]
    dtype: torch.dtype
    eps: float = 1e-6

    def run(self, fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        """Calls the kernel on ``step`` rows at a time."""
        width = self.cache_shape[3]
        cache = buffers.output("index_cache", self.cache_shape, self.dtype)
        tokens, heads = self.q.shape[:2]
        held_q, held = buffers.writable("q", self.q.flatten(1)), buffers.writable("key", self.key)
        q, key = held_q[:, : heads * width].view(tokens, heads, width), held[:, :width]
        positions, slots = buffers.read_only("positions", self.positions), buffers.read_only("slots", self.slots)
        cos_sin, norm = buffers.read_only("cos_sin", self.cos_sin), buffers.read_only("norm", self.norm)
        for start in range(0, max(1, tokens), max(1, step)):
            part = slice(start, start + step)
            fn(q[part], key[part], positions[part], cos_sin, norm[0], norm[1], self.eps, cache, slots[part])
        beyond = torch.cat([held_q[:, heads * width :], held[:, width:]], dim=1)
        return {"q": q.clone(), "index_cache": cache[1:].clone(), "beyond": beyond}

    def expect(self) -> dict[str, Expectation]:
        width, (tokens, heads) = self.cache_shape[3], self.q.shape[:2]
        angles = self.cos_sin[self.positions.long()]
        flat = self.q.flatten(1)
        turned = flat[:, : heads * width].double().view(tokens, heads, width)
        key = self.key[:, :width].double()
        centred = key - key.mean(dim=1, keepdim=True)
        scale = (centred.square().mean(dim=1, keepdim=True) + self.eps).rsqrt()
        weight, bias = self.norm.double()
        normed = centred * scale * weight + bias
        # The mean is as wrong as the sum it is made of; what hangs on it is amplified by the scale.
        size = (key.abs() + key.abs().mean(dim=1, keepdim=True)) * scale * weight.abs() + bias.abs()
        error = ROUNDOFF * (width**0.5 + 16.0) * size
        exact = exact_rotary(normed.unsqueeze(1), error.unsqueeze(1), angles)
        entry = stored(Close(exact.value[:, 0], exact.bound[:, 0]), self.dtype)
        value = torch.full(self.cache_shape, torch.nan, dtype=torch.float64)
        limit, granularity = torch.zeros_like(value), self.cache_shape[2]
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= granularity:
                place = (slot // granularity, 0, slot % granularity)
                value[place], limit[place] = entry.value[token], entry.bound[token]
        return {
            "q": exact_rotary(turned, torch.zeros_like(turned), angles),
            "index_cache": Close(value[1:], limit[1:]),
            "beyond": Exact(torch.cat([flat[:, heads * width :], self.key[:, width:]], dim=1)),
        }


def prologue_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The sizes of DeepSeek and odd ones, heads that are rotated whole, no tokens, padding, scattered slots."""
    for heads, width, rotary, tokens, granularity in (
        (4, 128, 64, 5, 64),
        (3, 31, 6, 9, 16),
        (1, 16, 16, 1, 1),
        (2, 32, 8, 0, 32),
    ):
        slots, blocks = random_slots(tokens, granularity, generator)
        inputs = IndexPrologue(
            q=torch.randn(tokens, heads, width + 3, generator=generator),
            key=torch.randn(tokens, width + 3, generator=generator) + 0.5,
            positions=torch.randint(0, 4000, (tokens,), generator=generator, dtype=torch.int32),
            cos_sin=random_table(rotary),
            norm=torch.randn(2, width, generator=generator),
            slots=slots,
            cache_shape=(blocks, 1, granularity, width),
            dtype=kv_dtype(signature),
        )
        yield Case(
            f"{tokens} tokens, {heads} heads of {width}, {rotary} rotated, g {granularity}",
            {"index_dim": width, "rotary_dim": rotary},
            partial(inputs.run, step=tokens),
            inputs.expect,
            split=partial(inputs.run, step=1),
        )


# ---------------------------------------------------------------- choosing


@dataclass(frozen=True)
class SelectShape:
    """Heads of the indexer and their width, g, tokens of an entry, entries chosen, queries and length of each row."""

    name: str
    heads: int
    width: int
    granularity: int
    stride: int
    chosen: int
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def traits(self) -> dict[str, TraitValue]:
        return {"index_dim": self.width, "index_heads": self.heads, "kernel_page_size": self.granularity}

    @property
    def entries(self) -> list[int]:
        """Of each row."""
        return [length // self.stride for length in self.seq_lens]


@dataclass(frozen=True)
class SelectInputs:
    """One call; q float32 [T + spare, Hi, D], weights float32 [T + spare, Hi]."""

    shape: SelectShape
    q: torch.Tensor
    weights: torch.Tensor
    pages: Pages

    def run(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """All rows in one call."""
        return self._run(fn, buffers, None)

    def split(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """Every query in a call of its own, as if the chunk had ended with it."""
        return self._run(fn, buffers, _rows(self.shape.queries))

    def _run(self, fn: KernelFunction, buffers: Buffers, queries: list[tuple[int, int, int]] | None) -> Outputs:
        shape = self.shape
        q, weights = buffers.read_only("q", self.q), buffers.read_only("weights", self.weights)
        wide = buffers.read_only("page_table", torch.nn.functional.pad(self.pages.tables, (0, 5), value=UNREAD))
        tables, cache = wide[:, : self.pages.tables.shape[1]], self.pages.arena[:, 0]
        out = buffers.output("selected", (q.shape[0], shape.chosen), torch.int32)
        if queries is None:
            starts = torch.tensor([0, *accumulate(shape.queries)], dtype=torch.int32)
            seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
            fn(q, weights, cache, tables, starts, seq_lens, shape.stride, out)
            return {"selected": out}
        starts = torch.tensor([0, 1], dtype=torch.int32)
        for row, place, behind in queries:
            one, length = slice(place, place + 1), max(0, shape.seq_lens[row] - behind)
            seq_lens = torch.tensor([length], dtype=torch.int32)
            fn(q[one], weights[one], cache, tables[row : row + 1], starts, seq_lens, shape.stride, out[one])
        return {"selected": out}

    def scores(self, row: int, place: int, behind: int) -> list[float]:
        """Float64, of the entries that the query sees."""
        seen = max(0, self.shape.seq_lens[row] - behind) // self.shape.stride
        keys = self.pages.positions(row, 0, self.shape.width, 0, seen)[:, 0]
        products = torch.einsum("hd,ld->lh", self.q[place].double(), keys).clamp(min=0.0)
        scores: list[float] = (products @ self.weights[place].double()).tolist()
        return scores

    def expect(self) -> dict[str, Expectation]:
        value = torch.full((self.q.shape[0], self.shape.chosen), torch.iinfo(torch.int32).min, dtype=torch.int32)
        for query in _rows(self.shape.queries):
            scores = self.scores(*query)
            best = sorted(range(len(scores)), key=lambda entry: (-scores[entry], entry))[: self.shape.chosen]
            value[query[1]] = -1
            value[query[1], : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
        return {"selected": Exact(value)}

    def undecided(self) -> list[int]:
        """Queries whose last chosen and first refused entry lie closer than float32 can tell apart."""
        found = []
        for query in _rows(self.shape.queries):
            ordered = sorted(self.scores(*query), reverse=True)
            rest = ordered[self.shape.chosen - 1 : self.shape.chosen + 1]
            if len(rest) == 2 and rest[0] - rest[1] < 1e-4 * abs(ordered[0]):
                found.append(query[1])
        return found


_SELECT_SHAPES = (
    SelectShape("the sizes of DeepSeek", 64, 128, 64, 1, 40, (3, 1), (200, 129)),
    SelectShape("no rows", 2, 16, 16, 1, 8, (), ()),
    SelectShape("empty rows, rows without queries, page edges", 8, 31, 16, 1, 7, (2, 0, 1, 17, 1), (0, 9, 16, 33, 1)),
    SelectShape("one entry a page, more queries than positions", 5, 6, 1, 1, 3, (4, 2), (3, 9)),
    SelectShape("entries of four tokens", 8, 32, 8, 4, 5, (9, 1, 1), (70, 3, 64)),
    SelectShape("one entry of many", 3, 16, 32, 1, 1, (1, 2), (300, 65)),
)


def _select_inputs(shape: SelectShape, dtype: torch.dtype, generator: torch.Generator) -> SelectInputs:
    field = (1, 1, shape.granularity, shape.width)
    pages = scatter_pages(field, shape.entries, [0] * len(shape.entries), dtype, generator)
    total = sum(shape.queries) + _SPARE
    q = torch.randn(total, shape.heads, shape.width, generator=generator)
    return SelectInputs(shape, q, torch.randn(total, shape.heads, generator=generator), pages)


def select_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Small integers, whose scores are exact whatever order they are added in, with many ties; and real numbers that
    float32 cannot confuse."""
    for shape in _SELECT_SHAPES:
        inputs = _select_inputs(shape, kv_dtype(signature), generator)
        whole = SelectInputs(shape, inputs.q.round(), inputs.weights.round(), inputs.pages.in_integers())
        yield Case(f"{shape.name}, integers", shape.traits, whole.run, whole.expect, split=whole.split)
        if shape.heads < 8:
            continue  # too often no head likes any entry: real numbers would be ties too
        while again := inputs.undecided():
            inputs.q[again] = torch.randn(len(again), shape.heads, shape.width, generator=generator)
        yield Case(f"{shape.name}, real numbers", shape.traits, inputs.run, inputs.expect, split=inputs.split)


def slow_select_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """A long row with thousands of entries chosen, and a chunk of many queries."""
    for shape in (
        SelectShape("a long row", 64, 128, 64, 1, 2048, (2,), (9000,)),
        SelectShape("a chunk", 8, 32, 64, 1, 100, (130,), (700,)),
    ):
        inputs = _select_inputs(shape, kv_dtype(signature), generator)
        whole = SelectInputs(shape, inputs.q.round(), inputs.weights.round(), inputs.pages.in_integers())
        yield Case(f"{shape.name}, integers", shape.traits, whole.run, whole.expect, split=whole.split)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class SelectedShape:
    """Query heads, elements of latent and rotary part, g, entries chosen, queries and entries of each row."""

    name: str
    heads: int
    latent: int
    rotary: int
    granularity: int
    chosen: int
    queries: tuple[int, ...]
    entries: tuple[int, ...]


@dataclass(frozen=True)
class SelectedInputs:
    """One call; q float32 [T + spare, Hq, L + R], selected int32 [T + spare, k]. What no query chose is NaN."""

    shape: SelectedShape
    q: torch.Tensor
    selected: torch.Tensor
    pages: Pages
    scale: float
    activations: str = "float32"

    def run(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """All rows in one call, with lse and without."""
        starts = torch.tensor([0, *accumulate(self.shape.queries)], dtype=torch.int32)
        return self._run(fn, buffers, [(slice(None), slice(None), starts)])

    def split(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """Every query in a call of its own."""
        starts = torch.tensor([0, 1], dtype=torch.int32)
        calls = [(slice(row, row + 1), slice(place, place + 1), starts) for row, place, _ in _rows(self.shape.queries)]
        return self._run(fn, buffers, calls)

    def _run(self, fn: KernelFunction, buffers: Buffers, calls: Sequence[tuple[slice, slice, torch.Tensor]]) -> Outputs:
        latent, cache = self.shape.latent, self.pages.arena[:, 0]
        q, selected = buffers.read_only("q", self.q), buffers.read_only("selected", self.selected)
        wide = buffers.read_only("page_table", torch.nn.functional.pad(self.pages.tables, (0, 5), value=UNREAD))
        tables = wide[:, : self.pages.tables.shape[1]]
        shape = (*self.q.shape[:2], latent)
        out, lse = buffers.output("out", shape, _FLOAT32), buffers.output("lse", shape[:2], _FLOAT32)
        alone = buffers.output("out without lse", shape, _FLOAT32)
        for rows, part, starts in calls:
            read = (q[part, :, :latent], q[part, :, latent:], cache, tables[rows], starts, selected[part], self.scale)
            fn(*read, out[part], lse[part])
            fn(*read, alone[part], None)
        return {"out": out, "lse": lse, "out without lse": alone}

    def expect(self) -> dict[str, Expectation]:
        heads, latent = self.shape.heads, self.shape.latent
        value = torch.full((self.q.shape[0], heads, latent), torch.nan, dtype=torch.float64)
        lse = torch.full(value.shape[:2], torch.nan, dtype=torch.float64)
        whole = Attention(value, torch.zeros_like(value), lse, torch.zeros_like(lse))
        for row, place, _ in _rows(self.shape.queries):
            places = self.selected[place][self.selected[place] >= 0].long()
            keys = self.pages.positions(row, 0, latent + self.shape.rotary, 0, self.shape.entries[row])[places]
            last = torch.tensor([keys.shape[0]])
            rules, rounding = ScoreRules(self.scale), roundoff_of(self.activations)
            exact = exact_attention(self.q[place].unsqueeze(0), last, keys, keys[..., :latent], 0, rules, rounding)
            for target, found in zip(vars(whole).values(), vars(exact).values(), strict=True):
                target[place] = found[0]
        out = Close(whole.out, whole.out_bound)
        return {"out": out, "lse": Close(whole.lse, whole.lse_bound), "out without lse": out}


_SELECTED_SHAPES = (
    SelectedShape("the sizes of DeepSeek", 16, 512, 64, 64, 70, (2, 1), (200, 65)),
    SelectedShape("no rows", 4, 32, 8, 16, 5, (), ()),
    SelectedShape("nothing to choose, less than asked for", 4, 64, 16, 32, 90, (1, 3, 0, 2), (0, 1, 40, 700)),
    SelectedShape("one entry a page, odd sizes", 3, 31, 6, 1, 4, (4, 2), (3, 9)),
    SelectedShape("keys that are values, many heads", 70, 48, 0, 16, 600, (1,), (900,)),
)


def _selected_inputs(shape: SelectedShape, dtype: torch.dtype, generator: torch.Generator) -> SelectedInputs:
    width = shape.latent + shape.rotary
    pages = scatter_pages((1, 1, shape.granularity, width), shape.entries, [0] * len(shape.entries), dtype, generator)
    total = sum(shape.queries) + _SPARE
    selected = torch.full((total, shape.chosen), -1, dtype=torch.int32)
    chosen = [torch.zeros(count, dtype=torch.bool) for count in shape.entries]
    for row, place, behind in _rows(shape.queries):
        count = min(max(0, shape.entries[row] - behind), shape.chosen)
        best = torch.randperm(shape.entries[row], generator=generator)[:count].sort().values
        selected[place, : len(best)] = best.to(torch.int32)
        chosen[row][best] = True
    for row, taken in enumerate(chosen):
        unread = torch.arange(len(taken))[~taken]
        blocks = pages.tables[row].long()[unread // shape.granularity]
        pages.arena[blocks, :, :, unread % shape.granularity] = torch.nan
    q = torch.randn(total, shape.heads, width, generator=generator)
    return SelectedInputs(shape, q, selected, pages, 1.5 * width**-0.5)


def _far_inputs(dtype: torch.dtype, generator: torch.Generator) -> SelectedInputs | None:
    """Blocks more than 2^31 bytes apart; None where memory forbids it."""
    pages = far_pages((1, 1, 16, 64), dtype, generator)
    if pages is None:
        return None
    shape = SelectedShape("large offsets", 2, 48, 16, 16, 4, (1,), (32,))
    selected = torch.tensor([[0, 15, 16, 31]], dtype=torch.int32)
    return SelectedInputs(shape, torch.randn(1, 2, 64, generator=generator), selected, pages, 0.2)


def selected_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Lists of every length, empty ones, odd sizes, far blocks; over a cache of bfloat16 or 8 bits once more for
    kernels that may round."""
    dtype = kv_dtype(signature)
    inputs = [_selected_inputs(shape, dtype, generator) for shape in _SELECTED_SHAPES]
    if dtype is torch.float16:
        inputs += [far for far in (_far_inputs(dtype, generator),) if far is not None]
    for one in inputs:
        shape = one.shape
        traits: dict[str, TraitValue] = {
            "latent_dim": shape.latent,
            "rotary_dim": shape.rotary,
            "kernel_page_size": shape.granularity,
        }
        yield Case(shape.name, traits, one.run, one.expect, split=one.split)
        if may_round(dtype):
            may = replace(one, activations="bfloat16")
            more = {**traits, "activations": "bfloat16"}
            yield Case(f"{shape.name}, rounded", more, may.run, may.expect, split=may.split)


register_cases("attention.index_prologue", prologue_cases)
register_cases("attention.index_select", select_cases, slow_select_cases)
register_cases("attention.mla_selected", selected_cases)
