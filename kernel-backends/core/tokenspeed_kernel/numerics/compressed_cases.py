"""Cases of attention.write, attention.compress and attention.apply_sinks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from tokenspeed_kernel.numerics.cases import Buffers, Case, Close, Exact, Expectation, Outputs, register_cases
from tokenspeed_kernel.numerics.paged import ROUNDOFF, UNREAD, Pages, kv_dtype, scatter_pages
from tokenspeed_kernel.numerics.prologue_cases import exact_rotary, random_slots, random_table
from tokenspeed_kernel.numerics.stored import as_stored, stored, with_extremes
from tokenspeed_kernel.ops.kv_cache import row_dtype
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue


def write_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd widths, no rows, padding, scattered slots, strided rows, values beyond what 8 bits hold."""
    dtype = kv_dtype(signature)
    for tokens, width, granularity in ((5, 512, 64), (9, 31, 16), (1, 6, 1), (0, 32, 8)):
        slots, blocks = random_slots(tokens, granularity, generator)
        x = with_extremes(torch.randn(tokens, width + 3, generator=generator), dtype)
        shape = (blocks, 1, granularity, width)

        def run(
            fn: KernelFunction,
            buffers: Buffers,
            step: int,
            x: torch.Tensor = x,
            slots: torch.Tensor = slots,
            shape: tuple[int, int, int, int] = shape,
        ) -> Outputs:
            cache = buffers.output("cache", shape, dtype)
            held, places = buffers.read_only("x", x), buffers.read_only("slots", slots)
            for start in range(0, max(1, x.shape[0]), max(1, step)):
                part = slice(start, start + step)
                fn(held[part, : shape[3]], cache, places[part])
            return {"cache": cache[1:].clone()}

        def expect(
            x: torch.Tensor = x, slots: torch.Tensor = slots, shape: tuple[int, int, int, int] = shape
        ) -> dict[str, Expectation]:
            value = torch.full(shape, torch.nan, dtype=dtype)
            for token, slot in enumerate(slots.tolist()):
                if slot >= shape[2]:
                    value[slot // shape[2], 0, slot % shape[2]] = as_stored(x[token, : shape[3]], dtype)
            return {"cache": Exact(value[1:])}

        name, traits = f"{tokens} rows of {width}, g {granularity}", {"entry_dim": width}
        yield Case(name, traits, partial(run, step=tokens), expect, split=partial(run, step=1))


@dataclass(frozen=True)
class CompressShape:
    """Elements of an entry and those rotated, tokens of an entry, g of the rows, queries and length of each row."""

    name: str
    width: int
    rotary: int
    stride: int
    granularity: int
    overlapping: bool
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def columns(self) -> int:
        return self.width * (2 if self.overlapping else 1)


@dataclass(frozen=True)
class CompressInputs:
    """One call. The pages' arena has values and gates as its two fields; the entries' cache has two a page, of
    ``dtype``."""

    shape: CompressShape
    pages: Pages
    bias: torch.Tensor
    norm: torch.Tensor
    cos_sin: torch.Tensor
    slots: torch.Tensor
    blocks: int
    dtype: torch.dtype
    eps: float = 1e-6

    def run(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """All rows in one call."""
        shape = self.shape
        starts = torch.tensor([0, *accumulate(shape.queries)], dtype=torch.int32)
        call = (slice(None), starts, torch.tensor(shape.seq_lens, dtype=torch.int32), slice(None))
        return self._run(fn, buffers, [call])

    def split(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """Every query in a call of its own."""
        starts, calls, place = torch.tensor([0, 1], dtype=torch.int32), [], 0
        for row, (count, length) in enumerate(zip(self.shape.queries, self.shape.seq_lens, strict=True)):
            for index in range(count):
                seq_len = torch.tensor([max(0, length - (count - 1 - index))], dtype=torch.int32)
                calls.append((slice(row, row + 1), starts, seq_len, slice(place, place + 1)))
                place += 1
        return self._run(fn, buffers, calls)

    def _run(
        self,
        fn: KernelFunction,
        buffers: Buffers,
        calls: list[tuple[slice, torch.Tensor, torch.Tensor, slice]],
    ) -> Outputs:
        shape, arena = self.shape, self.pages.arena
        cache = buffers.output("entries", (self.blocks, 1, 2, shape.width), self.dtype)
        wide = buffers.read_only("page_table", torch.nn.functional.pad(self.pages.tables, (0, 5), value=UNREAD))
        tables = wide[:, : self.pages.tables.shape[1]]
        held = [buffers.read_only(name, getattr(self, name)) for name in ("bias", "norm", "cos_sin", "slots")]
        for rows, starts, seq_lens, part in calls:
            fn(
                arena[:, 0], arena[:, 1], tables[rows], starts, seq_lens, held[0], held[1], self.eps, held[2], cache,
                held[3][part], shape.overlapping,
            )  # fmt: skip
        return {"entries": cache[1:].clone()}

    def expect(self) -> dict[str, Expectation]:
        shape = self.shape
        value = torch.full((self.blocks, 1, 2, shape.width), torch.nan, dtype=torch.float64)
        limit, place = torch.zeros_like(value), 0
        for row, (count, length) in enumerate(zip(shape.queries, shape.seq_lens, strict=True)):
            for position in range(length - count, length):
                slot = int(self.slots[place]) // shape.stride
                place += 1
                if position >= 0 and (position + 1) % shape.stride == 0 and slot >= 2:
                    entry = stored(self._entry(row, position + 1 - shape.stride), self.dtype)
                    target = (slot // 2, 0, slot % 2)
                    value[target], limit[target] = entry.value, entry.bound
        return {"entries": Close(value[1:], limit[1:])}

    def _entry(self, row: int, first: int) -> Close:
        shape = self.shape
        numbers, errors = [], []
        for begin, columns in ((first - shape.stride, slice(0, shape.width)), (first, slice(-shape.width, None))):
            if begin < 0 or (begin < first and not shape.overlapping):
                continue
            values, gates = (
                self.pages.positions(row, field, shape.columns, begin, begin + shape.stride)[:, 0, columns]
                for field in (0, 1)
            )
            bias = self.bias[:, columns].double()
            numbers.append((values, gates + bias))
            errors.append(gates.abs() + bias.abs())
        values, gates = (torch.cat(parts) for parts in zip(*numbers, strict=True))
        weights = torch.softmax(gates, dim=0)
        relative = 4.0 * ROUNDOFF * torch.cat(errors).amax(dim=0) + ROUNDOFF * (values.shape[0] + 48.0)
        total, error = (weights * values).sum(dim=0), relative * (weights * values.abs()).sum(dim=0)
        mean = total.square().mean() + self.eps
        scale, norm = mean.rsqrt(), self.norm.double()
        entry = total * scale * norm
        drift = (total.abs() * error).mean() / mean + ROUNDOFF * (shape.width**0.5 + 16.0)
        bound = error * scale * norm.abs() + entry.abs() * drift
        # Pairs of neighbours at the end are halves at the beginning, in another order.
        ends = torch.arange(shape.width - shape.rotary, shape.width).view(-1, 2).T.reshape(-1)
        order = torch.cat([ends, torch.arange(shape.width - shape.rotary)])
        turned = exact_rotary(entry[None, None, order], bound[None, None, order], self.cos_sin[first : first + 1])
        back = order.argsort()
        return Close(turned.value[0, 0, back], turned.bound[0, 0, back])


_COMPRESS_SHAPES = (
    CompressShape("chosen entries of DeepSeek-V4", 128, 64, 4, 16, True, (9, 1, 1), (33, 8, 7)),
    CompressShape("all entries of DeepSeek-V4", 128, 64, 32, 32, False, (70, 1), (70, 96)),
    CompressShape("no rows", 16, 8, 4, 8, True, (), ()),
    CompressShape("one token an entry", 12, 4, 1, 3, True, (3, 0, 2), (3, 5, 9)),
    CompressShape("more queries than positions", 10, 6, 3, 2, False, (5, 4), (3, 0)),
)


def compress_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Entries that overlap and that do not, first ones, chunks that end within an entry, rows that complete none."""
    for shape in _COMPRESS_SHAPES:
        field = (2, 1, shape.granularity, shape.columns)
        back = shape.stride * (2 if shape.overlapping else 1)  # what lies before it may be another's by now
        firsts = [
            max(0, length - count + 1 - back) for count, length in zip(shape.queries, shape.seq_lens, strict=True)
        ]
        dtype = kv_dtype(signature)
        pages = scatter_pages(field, shape.seq_lens, firsts, row_dtype(dtype), generator)
        tokens = sum(shape.queries)
        blocks = tokens + 2
        entries = torch.randperm(2 * (blocks - 1), generator=generator)[:tokens] + 2
        if tokens > 3:
            entries[tokens - 2] = 1  # padding, of a token that may complete an entry
        inputs = CompressInputs(
            shape=shape,
            pages=pages,
            bias=torch.randn(shape.stride, shape.columns, generator=generator),
            norm=torch.randn(shape.width, generator=generator),
            cos_sin=random_table(shape.rotary),
            slots=entries.to(torch.int64) * shape.stride + shape.stride - 1,
            blocks=blocks,
            dtype=dtype,
        )
        traits: dict[str, TraitValue] = {
            "entry_dim": shape.width,
            "overlapping": shape.overlapping,
            "kernel_page_size": shape.granularity,
        }
        yield Case(shape.name, traits, inputs.run, inputs.expect, split=inputs.split)


def _sinks_case(name: str, x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Case:
    tokens, _, width = x.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out, held = buffers.writable("x", x), buffers.read_only("lse", lse)
        scores = buffers.read_only("sinks", sinks)
        for start in range(0, max(1, tokens), max(1, step)):
            part = slice(start, start + step)
            fn(out[part], held[part], scores)
        return {"x": out}

    def expect() -> dict[str, Expectation]:
        gap = lse.double() - sinks.double()
        value = x.double() / (1.0 + torch.exp(-gap)).unsqueeze(-1)
        # the difference is rounded once, which is the relative error of its exponential
        size = torch.where(gap.isinf(), 0.0, lse.double().abs() + sinks.double().abs()).unsqueeze(-1)
        return {"x": Close(value, ROUNDOFF * (64.0 + 2.0 * size) * value.abs() + 1e-35)}

    traits: dict[str, TraitValue] = {"head_dim": width}
    return Case(name, traits, partial(run, step=tokens), expect, split=partial(run, step=1))


def sinks_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd sizes, no tokens, sinks far above and below, heads that saw no key."""
    for tokens, heads, width in ((3, 4, 512), (9, 3, 31), (1, 1, 1), (0, 2, 16)):
        x, lse = torch.randn(tokens, heads, width, generator=generator), torch.randn(tokens, heads, generator=generator)
        yield _sinks_case(f"{tokens} x {heads} of {width}", x, lse * 3.0, torch.randn(heads, generator=generator))
    x = torch.randn(3, 2, 20, generator=generator)
    x[2] = 0.0
    lse = torch.tensor([[40.0, -40.0], [0.0, 90.0], [-torch.inf, -torch.inf]])
    yield _sinks_case("far apart, and no key", x, lse, torch.tensor([-30.0, 30.0]))


register_cases("attention.apply_sinks", sinks_cases)
register_cases("attention.write", write_cases)
register_cases("attention.compress", compress_cases)
