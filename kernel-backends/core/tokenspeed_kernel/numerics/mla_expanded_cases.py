"""Cases of attention.mla_extend_expanded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_ELEMENTS
from tokenspeed_kernel.numerics.cases import Buffers, Case, Close, Expectation, Outputs, register_cases
from tokenspeed_kernel.numerics.paged import (
    ROUNDOFF,
    UNREAD,
    Pages,
    exact_attention,
    kv_dtype,
    may_round,
    roundoff_of,
    scatter_pages,
)
from tokenspeed_kernel.numerics.weights import RandomWeight, random_weight
from tokenspeed_kernel.ops.paged_reference import ScoreRules
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FORMAT_NAMES = {tensor_format: name for name, tensor_format in WEIGHT_FORMATS.items()}
_SPARE = 2  # rows of q and out that belong to no row


@dataclass(frozen=True)
class ExpandedShape:
    """What a case is about: query heads, elements of latent, rotated part, plain part and value, g, queries and length
    of each row."""

    name: str
    heads: int
    latent: int
    rotary: int
    plain: int
    value: int
    granularity: int
    queries: tuple[int, ...]
    seq_lens: tuple[int, ...]


@dataclass(frozen=True)
class ExpandedReads:
    """One call. q float32 [T + spare, Hq, P + R]; pages of one field and one head."""

    shape: ExpandedShape
    q: torch.Tensor
    pages: Pages
    random: RandomWeight
    scale: float
    activations: str = "float32"

    def _operands(self, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q as rows of a wider buffer, the cache, the page tables likewise, and out."""
        wide = buffers.read_only("q", torch.nn.functional.pad(self.q.flatten(1), (0, 3), value=torch.nan))
        q = wide[:, : self.q[0].numel()].view(self.q.shape)
        tables = buffers.read_only("page_table", torch.nn.functional.pad(self.pages.tables, (0, 5), value=UNREAD))
        out = buffers.output("out", (*self.q.shape[:2], self.shape.value), torch.float32)
        return q, self.pages.arena[:, 0], tables[:, : self.pages.tables.shape[1]], out

    def run(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """All rows in one call."""
        q, cache, tables, out = self._operands(buffers)
        starts = torch.tensor([0, *accumulate(self.shape.queries)], dtype=torch.int32)
        fn(q, cache, tables, starts, torch.tensor(self.shape.seq_lens, dtype=torch.int32), self.scale, out)
        return {"out": out}

    def split(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """Every query in a call of its own, as if the chunk had ended with it."""
        q, cache, tables, out = self._operands(buffers)
        starts, place = torch.tensor([0, 1], dtype=torch.int32), 0
        for row, (count, seq_len) in enumerate(zip(self.shape.queries, self.shape.seq_lens, strict=True)):
            for index in range(count):
                one = slice(place + index, place + index + 1)
                length = torch.tensor([max(0, seq_len - count + index + 1)], dtype=torch.int32)
                fn(q[one], cache, tables[row : row + 1], starts, length, self.scale, out[one])
            place += count
        return {"out": out}

    def expect(self) -> dict[str, Expectation]:
        """Keys and values in float64, and attention over them; the bound has what expanding them in float32 adds."""
        value = torch.full((*self.q.shape[:2], self.shape.value), torch.nan, dtype=torch.float64)
        bound, place = torch.zeros_like(value), 0
        for row, count in enumerate(self.shape.queries):
            here = slice(place, place + count)
            value[here], bound[here] = self._exact_row(row, self.q[here])
            place += count
        return {"out": Close(value, bound)}

    def _exact_row(self, row: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, seq_len = self.shape, self.shape.seq_lens[row]
        entries = self.pages.positions(row, 0, shape.latent + shape.rotary, 0, seq_len)[:, 0]
        latents, rotated = torch.split(entries, [shape.latent, shape.rotary], dim=-1)
        values, sizes = (
            torch.einsum("sl,hel->she", x, w.reshape(shape.heads, -1, shape.latent))
            for x, w in ((latents, self.random.values), (latents.abs(), self.random.magnitude))
        )
        off = ROUNDOFF * (shape.latent**0.5 + 8.0) * sizes
        keys = torch.cat([values[..., : shape.plain], rotated.unsqueeze(1).expand(-1, shape.heads, -1)], dim=-1)
        values, off_keys, off_values = values[..., shape.plain :], off[..., : shape.plain], off[..., shape.plain :]
        positions = torch.arange(seq_len - q.shape[0], seq_len)
        # Keys are rounded beside the queries, values beside the weights: the same again of each.
        rounding = 2.0 * roundoff_of(self.activations)
        exact = exact_attention(q, positions, keys, values, 0, ScoreRules(self.scale), rounding)
        if seq_len == 0:
            return exact.out, exact.out_bound
        scores = torch.einsum("nhd,lhd->nhl", q.double(), keys) * self.scale
        hidden = (torch.arange(seq_len) > positions.unsqueeze(1)).unsqueeze(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
        slips = torch.einsum("nhp,lhp->nhl", q[..., : shape.plain].double().abs(), off_keys) * self.scale
        slip = slips.masked_fill(hidden, 0.0).amax(dim=-1, keepdim=True)
        more = torch.einsum("nhl,lhv->nhv", weights, off_values)
        more = more + 2.0 * slip * torch.einsum("nhl,lhv->nhv", weights, values.abs())
        return exact.out, exact.out_bound + more


_SHAPES = (
    ExpandedShape("the sizes of DeepSeek", 2, 512, 64, 128, 128, 64, (33,), (130,)),
    ExpandedShape("no rows", 4, 32, 8, 16, 12, 16, (), ()),
    ExpandedShape(
        "with and without a prefix, rows without queries", 3, 64, 16, 24, 20, 32, (7, 0, 0, 1, 40), (7, 0, 9, 130, 200)
    ),
    ExpandedShape("more queries than positions, odd sizes", 3, 31, 6, 5, 7, 1, (4, 2, 3), (3, 9, 0)),
)
_BLOCKED = ExpandedShape("weights in blocks", 2, 0, 6, 10, 9, 8, (5, 21), (70, 21))


def _shapes(format_name: str) -> tuple[ExpandedShape, ...]:
    """All of them for dense weights; one whose latent is a block for each of the many formats of blocks."""
    elements = BLOCK_ELEMENTS.get(format_name)
    return _SHAPES if elements is None else (replace(_BLOCKED, latent=elements),)


def expanded_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Chunks with and without a prefix, rows without queries or keys, rows that belong to nobody, odd sizes; over a
    cache of bfloat16 or 8 bits once more for kernels that may round."""
    format_name = _FORMAT_NAMES[signature["weight"]]
    for shape in _shapes(format_name):
        width = shape.latent + shape.rotary
        field, zeros = (1, 1, shape.granularity, width), [0] * len(shape.seq_lens)
        pages = scatter_pages(field, shape.seq_lens, zeros, kv_dtype(signature), generator)
        random = random_weight(format_name, shape.heads * (shape.plain + shape.value), shape.latent, generator)
        head = shape.plain + shape.rotary
        q = torch.randn(sum(shape.queries) + _SPARE, shape.heads, head, generator=generator)
        reads = ExpandedReads(shape, q, pages, random, 1.5 * head**-0.5)
        traits: dict[str, TraitValue] = {
            "latent_dim": shape.latent,
            "rotary_dim": shape.rotary,
            "plain_dim": shape.plain,
            "value_dim": shape.value,
            "kernel_page_size": shape.granularity,
        }
        bound = {"weight": random.weight, "heads": shape.heads}
        yield Case(shape.name, traits, reads.run, reads.expect, bound, reads.split)
        if may_round(pages.arena.dtype):
            reads = replace(reads, activations="bfloat16")
            traits = {**traits, "activations": "bfloat16"}
            yield Case(f"{shape.name}, rounded", traits, reads.run, reads.expect, bound, reads.split)


register_cases("attention.mla_extend_expanded", expanded_cases)
