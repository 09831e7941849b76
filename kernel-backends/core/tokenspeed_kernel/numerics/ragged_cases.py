"""Cases of attention.ragged."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from tokenspeed_kernel.numerics.cases import Buffers, Case, Close, Expectation, Outputs, register_cases
from tokenspeed_kernel.numerics.paged import exact_attention, roundoff_of
from tokenspeed_kernel.numerics.prologue_cases import Heads
from tokenspeed_kernel.ops.paged_reference import ScoreRules
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FLOAT32 = torch.float32
_SPARE = 2  # rows of q and out that belong to no row, and keys behind the last row's


@dataclass(frozen=True)
class RaggedShape:
    """What a case is about: heads (their ``dim`` that of q and k), elements of a head of v, queries and keys of each
    row."""

    name: str
    heads: Heads
    value: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class RaggedInputs:
    """One call. q float32 [T + spare, Hq, D + 3]; kv float32 [S + spare, Hkv, D + Dv], of which k and v are views, its
    last rows NaN."""

    shape: RaggedShape
    causal: bool
    q: torch.Tensor
    kv: torch.Tensor
    scale: float
    activations: str = "float32"

    def _call(self, fn: KernelFunction, buffers: Buffers, with_lse: bool) -> Outputs:
        shape, width = self.shape, self.shape.heads.dim
        q, kv = buffers.read_only("q", self.q), buffers.read_only("kv", self.kv)
        out = buffers.output("out", (*self.q.shape[:2], shape.value), _FLOAT32)
        lse = buffers.output("lse", tuple(self.q.shape[:2]), _FLOAT32)
        starts, key_starts = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (shape.queries, shape.keys)
        )
        tensors = (q[..., :width], kv[..., :width], kv[..., width:], starts, key_starts)
        fn(*tensors, self.scale, out, lse if with_lse else None, self.causal)
        return {"out": out, "lse": lse} if with_lse else {"out without lse": out}

    def run(self, fn: KernelFunction, buffers: Buffers) -> Outputs:
        """With lse and without."""
        whole = self._call(fn, buffers, with_lse=True)
        return {**whole, **self._call(fn, buffers, with_lse=False)}

    def expect(self) -> dict[str, Expectation]:
        shape, width = self.shape, self.shape.heads.dim
        value = torch.full((*self.q.shape[:2], shape.value), torch.nan, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], torch.nan, dtype=torch.float64)
        bound, lse_bound = torch.zeros_like(value), torch.zeros_like(lse)
        # Keys are rounded beside the queries, values beside the weights: the same again of each.
        rounding = 2.0 * roundoff_of(self.activations)
        place, first = 0, 0
        for queries, keys in zip(shape.queries, shape.keys, strict=True):
            here, kv = slice(place, place + queries), self.kv[first : first + keys]
            positions = torch.arange(keys - queries, keys) if self.causal else torch.full((queries,), keys)
            k, v, rules = kv[..., :width], kv[..., width:], ScoreRules(self.scale)
            exact = exact_attention(self.q[here, :, :width], positions, k, v, 0, rules, rounding)
            value[here], bound[here] = exact.out, exact.out_bound
            lse[here], lse_bound[here] = exact.lse, exact.lse_bound
            place, first = place + queries, first + keys
        out = Close(value, bound)
        return {"out": out, "lse": Close(lse, lse_bound), "out without lse": out}


_SHAPES = (
    RaggedShape("the sizes of DeepSeek", Heads(8, 1, 192), 128, (33,), (70,)),
    RaggedShape("no rows", Heads(1, 2, 16), 8, (), ()),
    RaggedShape("rows without queries or keys", Heads(2, 2, 24), 40, (5, 0, 3, 0, 1), (5, 7, 0, 0, 130)),
    RaggedShape("more queries than keys, odd sizes", Heads(1, 3, 7), 5, (4, 9), (3, 200)),
)


def ragged_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """With and without a mask: chunks behind a prefix, rows without queries or keys, rows that belong to nobody; each
    once more for kernels that may round."""
    for shape in _SHAPES:
        heads = shape.heads
        for causal in (True, False):
            q = torch.randn(sum(shape.queries) + _SPARE, heads.query, heads.dim + 3, generator=generator)
            kv = torch.randn(sum(shape.keys) + _SPARE, heads.kv, heads.dim + shape.value, generator=generator)
            kv[sum(shape.keys) :] = torch.nan
            inputs = RaggedInputs(shape, causal, q, kv, 1.5 * heads.dim**-0.5)
            traits: dict[str, TraitValue] = {
                "head_dim": heads.dim,
                "value_dim": shape.value,
                "q_per_kv": heads.per_kv,
                "causal": causal,
            }
            name = f"{shape.name}, {'causal' if causal else 'all keys'}"
            yield Case(name, traits, inputs.run, inputs.expect)
            rounded = replace(inputs, activations="bfloat16")
            yield Case(f"{name}, rounded", {**traits, "activations": "bfloat16"}, rounded.run, rounded.expect)


register_cases("attention.ragged", ragged_cases)
