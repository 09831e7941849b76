"""Matrices of one format and width, one below the other in one piece of memory."""

import torch

from tokenspeed.layers.huge_memory import huge_zeros
from tokenspeed_kernel.quantized import QuantizedTensor


class RowStack:
    """Takes ``count`` matrices like ``first``; ``source`` names the whole in messages.

    Matrices that lie one behind the other in memory already are not copied: the stack is a view of them.

    Attributes:
        format: of all of them.
    """

    def __init__(self, first: QuantizedTensor, count: int, *, source: str) -> None:
        self.format = first.format
        self._first = first
        self._shape = (first.shape[0] * count, first.shape[1])
        self._source = source
        self._planes: dict[str, torch.Tensor] = {}
        self._next = {name: plane.data_ptr() for name, plane in first.planes.items()}
        self._in_place = True
        self._put: list[QuantizedTensor] = []

    def put(self, place: int, part: QuantizedTensor) -> None:
        """Adds the next part, number ``place``."""
        if self._in_place and not self._follows(part):
            self._in_place = False
            self._planes = {name: self._memory(plane) for name, plane in self._first.planes.items()}
            for before, held in enumerate(self._put):
                self._copy(before, held)
            self._put.clear()
        if self._in_place:
            self._put.append(part)
        else:
            self._copy(place, part)

    @property
    def whole(self) -> QuantizedTensor:
        """All that was put, as one weight."""
        planes = self._planes
        if self._in_place:
            planes = {
                name: plane.as_strided((self._rows(plane), plane.shape[1]), (plane.shape[1], 1))
                for name, plane in self._first.planes.items()
            }
        return QuantizedTensor(format=self.format, shape=self._shape, planes=planes, source=self._source)

    def _follows(self, part: QuantizedTensor) -> bool:
        """Whether every plane of ``part`` begins where that of the part before ended."""
        for name, plane in part.planes.items():
            first = self._first.planes[name]
            if plane.data_ptr() != self._next[name] or not plane.is_contiguous():
                return False
            if plane.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                return False
            self._next[name] = plane.data_ptr() + plane.nbytes
        return True

    def _rows(self, plane: torch.Tensor) -> int:
        return plane.shape[0] * (self._shape[0] // self._first.shape[0])

    def _memory(self, plane: torch.Tensor) -> torch.Tensor:
        rows, width = self._rows(plane), plane.shape[1]
        return huge_zeros(rows * width * plane.element_size()).view(plane.dtype).view(rows, width)

    def _copy(self, place: int, part: QuantizedTensor) -> None:
        for name, plane in part.planes.items():
            self._planes[name][place * plane.shape[0] : (place + 1) * plane.shape[0]] = plane
