"""What a model says of its weights, and the weights once they are loaded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tokenspeed.layers.shard import Shard, ShardKind
from tokenspeed_kernel.quantized import QuantizedTensor

JOIN_COPY_LIMIT = 4 << 20
"""Bytes up to which neighbours are joined by a copy; reading more takes far longer than the call that a join saves."""


RowOrder = Callable[[int], torch.Tensor]
"""For a number of rows, int64 [rows]: where each row of the weight lies among those that the checkpoint has."""


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One weight a model needs.

    Attributes:
        name: as in a Hugging Face checkpoint ("model.layers.0.self_attn.q_proj.weight").
        shape: of the whole weight: (rows, columns) for a matrix, (length,) for a vector.
        shard: the part this rank holds.
        rotary_heads: the rows are this many heads of rotary pairs (q and k), which GGUF llama files store permuted;
            0 for all others.
        parts: tensors of equal shape whose rows, one below the other, are the weight (the experts of a layer), where it
            is not one tensor of its own name.
        stored: the shape that the checkpoint has it in, where that is another: [experts, rows, columns], or a
            convolution's [channels, 1, width].
        is_float: small numbers of any shape that the model wants as float32; vectors always are.
        row_order: how the rows that a rank holds are put into order; it must not cross a shard's border.
        offset: is added to every number of a float: some norms are stored as what they have beyond 1.
        transposed: of a matrix that is ``stored`` as [experts, columns, rows of one]: each expert's is turned, and put
            into ``row_order``, on its own.
        below: where above 0, the numbers are whole and lie in [0, below); they become int32.
        sections: the rows are so many parts, each of which the ranks share out on its own, where a range of all rows
            would be the whole of some and nothing of others (gate and up of every expert; queries, keys and values in
            one matrix). Of a weight of ``parts`` each is one.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard
    rotary_heads: int = 0
    parts: tuple[str, ...] = ()
    stored: tuple[int, ...] = ()
    is_float: bool = False
    row_order: RowOrder | None = None
    offset: float = 0.0
    transposed: bool = False
    below: int = 0
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or min(self.shape) < 1:
            raise ValueError(f"weight {self.name}: shape {self.shape} is neither a matrix nor a vector")
        if self.rotary_heads and self.shape[0] % (2 * self.rotary_heads):
            raise ValueError(f"weight {self.name}: {self.shape[0]} rows are not {self.rotary_heads} heads of even size")
        if self.parts and self.shape[0] % len(self.parts):
            raise ValueError(f"weight {self.name}: {self.shape[0]} rows are not {len(self.parts)} equal parts")
        if self.sections and sum(self.sections) != self.shape[0]:
            raise ValueError(f"weight {self.name}: {self.shape[0]} rows are not sections of {sum(self.sections)} rows")
        if self.sections and self.parts and len(self.sections) != len(self.parts):
            raise ValueError(f"weight {self.name}: of {len(self.parts)} parts each is a section of its own")
        if self.stored and math.prod(self.stored) != math.prod(self.shape):
            raise ValueError(f"weight {self.name}: {self.stored} and {self.shape} hold different numbers of elements")
        if self.transposed and (len(self.stored) != 3 or self.stored[1] != self.shape[-1]):
            raise ValueError(
                f"weight {self.name}: stored as {self.stored} it is no transpose of {self.shape}; that is [experts, "
                "columns, rows of one]"
            )

    @property
    def is_matrix(self) -> bool:
        """Whether kernels multiply by it, in whatever format it is stored in."""
        return len(self.shape) == 2 and not self.is_float and not self.below

    @property
    def tensors(self) -> tuple["WeightSpec", ...]:
        """What the checkpoint holds of it: itself, or each of its parts, whole."""
        if not self.parts:
            return (self,)
        shape = (self.shape[0] // len(self.parts), *self.shape[1:])
        each = self.shard
        if not self.sections and self.shard.kind != "columns":
            each = Shard(kind="replicated", rank=0, world=1)
        return tuple(WeightSpec(name=name, shape=shape, shard=each, is_float=self.is_float) for name in self.parts)

    @property
    def row_ranges(self) -> tuple[tuple[int, int], ...]:
        """The rows that this rank holds, (start, stop) each, in order, those that touch as one."""
        if not self.sections:
            return (self.shard.row_range(self.shape[0]),)
        return _ranges(self.sections, self.shard)

    def of_experts(self, count: int) -> tuple[range, tuple[tuple[int, int], ...]]:
        """Of rows that are those of ``count`` experts: the experts of which this rank holds something, and the rows of
        each. ValueError where an expert would be cut that is not to be."""
        each = self.shape[0] // count
        if self.sections:
            return range(count), _ranges(self.sections[: len(self.sections) // count], self.shard)
        start, stop = self.shard.row_range(self.shape[0])
        if start % each or stop % each:
            raise ValueError(f"{count} experts of {self.name} cannot be divided among {self.shard.world} ranks")
        return range(start // each, stop // each), ((0, each),)


def _ranges(sections: Sequence[int], shard: Shard) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    first = 0
    for size in sections:
        start, stop = shard.row_range(size)
        if ranges and ranges[-1][1] == first + start:
            ranges[-1] = (ranges[-1][0], first + stop)
        else:
            ranges.append((first + start, first + stop))
        first += size
    return tuple(ranges)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Writes specs for one rank of ``world``."""

    rank: int
    world: int

    def sharing(self, heads: int) -> "Ranks":
        """The ranks as they share so few heads: where they are more than the heads, neighbours have the same one."""
        if self.world <= heads:
            return self
        return Ranks(rank=self.rank * heads // self.world, world=heads)

    def rows(self, name: str, rows: int, *columns: int, **more: Any) -> WeightSpec:
        """The ranks share the rows: outputs, heads, experts."""
        return self._spec(name, (rows, *columns), "rows", more)

    def vocabulary(self, name: str, rows: int, columns: int) -> WeightSpec:
        """The ranks share the rows, one for each token of a vocabulary, which need not be divisible."""
        return self._spec(name, (rows, columns), "vocabulary", {})

    def columns(self, name: str, rows: int, columns: int, **more: Any) -> WeightSpec:
        """The ranks share the columns; their results are partial sums."""
        return self._spec(name, (rows, columns), "columns", more)

    def whole(self, name: str, *shape: int, **more: Any) -> WeightSpec:
        """Every rank has all of it."""
        return self._spec(name, shape, "replicated", more)

    def _spec(self, name: str, shape: tuple[int, ...], kind: ShardKind, more: dict[str, Any]) -> WeightSpec:
        return WeightSpec(name=name, shape=shape, shard=Shard(kind=kind, rank=self.rank, world=self.world), **more)


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """A rank's weights by name.

    Attributes:
        matrices: QuantizedTensor [rows, columns] of this rank, those that nobody took yet; on the host most are views
            of a read-only map of the file.
        vectors: float32 (norms, biases, and whatever else a spec says is a float); int32 what it says is whole.
        rotary_factors: float32 [head_dim / 2] divisors of the rotary frequencies, where the checkpoint stores them.
    """

    matrices: dict[str, QuantizedTensor]
    vectors: dict[str, torch.Tensor]
    rotary_factors: torch.Tensor | None = None

    def take(self, name: str) -> QuantizedTensor:
        """The matrix ``name``, handed over: it is not among ``matrices`` any more. Whoever takes it binds all kernels
        that read it and lets it go, and what none of them keeps goes out of memory. KeyError where there is none, or it
        was taken."""
        return self.matrices.pop(name)

    @property
    def device(self) -> torch.device:
        """Where they lie, and with them whatever a forward makes."""
        return next(iter(self.vectors.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes mapped or held, of what was not taken."""
        held = sum(weight.nbytes for weight in self.matrices.values())
        return held + sum(vector.nbytes for vector in self.vectors.values())


def unpermuted_rows(rows: int, heads: int) -> torch.Tensor:
    """int64 [rows]: where each row of rotate-half order lies in a weight stored for interleaved rotary.

    A head of D rows is stored as the pairs (0, D/2), (1, D/2 + 1) ...; row i of the result comes from row 2i of its
    head, row D/2 + i from row 2i + 1.
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(rows)


def paired_rotary_rows(head_dim: int, rotary: int, start: int = 0) -> RowOrder:
    """The order of heads of ``head_dim`` rows of which ``rotary`` from ``start`` on rotate: the checkpoint has those
    that rotate together side by side, and kernels want them half a rotary part apart."""
    within = torch.arange(head_dim)
    turned = within[start : start + rotary]
    within[start : start + rotary] = turned.view(rotary // 2, 2).transpose(0, 1).reshape(rotary)
    return _every(within)


def gate_before_up(intermediate: int) -> RowOrder:
    """The order of experts' rows, of which the checkpoint has those of gate and up in turn: all of an expert's gate,
    then all of its up."""
    return _every(torch.arange(2 * intermediate).view(intermediate, 2).transpose(0, 1).reshape(2 * intermediate))


def _every(within: torch.Tensor) -> RowOrder:
    """The order that has ``within`` in every len(within) rows."""

    def order(rows: int) -> torch.Tensor:
        size = len(within)
        return (torch.arange(rows // size).unsqueeze(1) * size + within).reshape(rows)

    return order


def joined(parts: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Stacks the rows of ``parts`` into one weight where that is worth it, else returns None.

    One product instead of several saves a call and a round of the thread team, about ten microseconds. Weights that lie
    behind one another in the file (gate and up do, in GGUF and in safetensors) join as a view, at no cost. Others join
    by a copy up to JOIN_COPY_LIMIT bytes; above it the copy would double resident memory to save nothing that shows.
    """
    first = parts[0]
    if any(part.format != first.format or part.shape[1] != first.shape[1] for part in parts):
        return None
    rows = sum(part.shape[0] for part in parts)
    if all(_follows(before, after) for before, after in pairwise(parts)):
        planes = {
            name: plane.as_strided((rows, plane.shape[1]), (plane.shape[1], 1)) for name, plane in first.planes.items()
        }
        source = " + ".join(part.source for part in parts)
        return QuantizedTensor(format=first.format, shape=(rows, first.shape[1]), planes=planes, source=source)
    if sum(part.nbytes for part in parts) <= JOIN_COPY_LIMIT:
        return QuantizedTensor.concat(list(parts))
    return None


def _follows(before: QuantizedTensor, after: QuantizedTensor) -> bool:
    """Whether every plane of ``after`` begins in the same storage where that of ``before`` ends."""
    for name, plane in before.planes.items():
        other = after.planes[name]
        if not plane.is_contiguous() or not other.is_contiguous():
            return False
        if plane.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
            return False
        if plane.storage_offset() + plane.numel() != other.storage_offset():
            return False
    return True
