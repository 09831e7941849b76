"""Where weights come from, and the read-only map of a file that they are views of."""

import mmap
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed_kernel.quantized import QuantizedTensor


class WeightSource(Protocol):
    """One opened checkpoint; names are those of Hugging Face checkpoints."""

    @property
    def where(self) -> str:
        """For messages: the file or folder."""
        ...

    def names(self) -> frozenset[str] | None:
        """Every tensor it holds; None where it makes whatever is asked for."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """(rows, columns), (length,) or, of several matrices in one tensor, (count, rows, columns) of the tensor
        ``name``, which it holds."""
        ...

    def matrix(self, spec: WeightSpec) -> QuantizedTensor:
        """The whole matrix as it is stored; a view of the file where possible."""
        ...

    def converted(self, spec: WeightSpec, /) -> QuantizedTensor | None:
        """The rank's part of a matrix that kernels do not take as it is stored, made into one that they do, its rows in
        the spec's order; None where ``matrix`` has it."""
        ...

    def is_converted(self, name: str) -> bool:
        """Whether ``converted`` makes the tensor ``name``, which it holds, into another."""
        ...

    def vector(self, spec: WeightSpec) -> torch.Tensor:
        """The whole tensor as float32, in the spec's shape (a copy)."""
        ...

    def forget(self, name: str) -> None:
        """The tensor ``name`` was copied: what of the file is in memory for it may go."""
        ...

    def reuse(self) -> None:
        """All that ``converted`` gave so far was copied: its memory may be written again."""
        ...

    def rotary_factors(self) -> torch.Tensor | None:
        """float32 [head_dim / 2] divisors of the rotary frequencies, where the checkpoint has them."""
        ...


def share_of(weight: QuantizedTensor, spec: WeightSpec) -> QuantizedTensor:
    """A rank's part of the whole matrix of ``spec``: a view where it is one range of rows, else a copy. Raises
    WeightError where its columns would cut a block."""
    ranges = spec.row_ranges
    if ranges != ((0, spec.shape[0]),):
        pieces = [weight.rows(start, stop) for start, stop in ranges]
        weight = pieces[0] if len(pieces) == 1 else QuantizedTensor.concat(pieces)
    start, stop = spec.shard.column_range(spec.shape[1])
    return weight if (start, stop) == (0, spec.shape[1]) else weight.columns(start, stop)


class MappedFile:
    """A file as one read-only uint8 tensor. Views of it share its storage and keep the map alive.

    Huge pages are asked for: where the file system grants them, weights are read in place at the full bandwidth.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped ({error})") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Where the kernel was built without it, small pages do the same, more slowly.
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            # torch warns that the memory is read-only. Nothing here writes to weights; a write would end the process.
            warnings.simplefilter("ignore", UserWarning)
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def forget(self, offset: int, nbytes: int) -> None:
        """Gives the whole pages of a part back that is not needed any more. Who reads it all the same gets it from the
        file again."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def view(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The ``nbytes`` from ``offset`` on as a flat tensor of ``dtype``: a view; a copy where unaligned."""
        piece = self.bytes[offset : offset + nbytes]
        if offset % dtype.itemsize:
            piece = piece.clone()
        return piece.view(dtype)
