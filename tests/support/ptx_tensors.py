"""Matrices of ptx_machine: what a TMA descriptor names, and how wgmma reads shared memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from ptx_arithmetic import MachineError

LINE_BYTES = 128
"""Of the only swizzle that is modelled."""


@dataclass(frozen=True)
class TensorMap:
    """What a TMA descriptor says: base address, element bytes, extents and byte strides (innermost first, whose stride
    is the element), and the box that one load takes."""

    base: int
    element: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def box_bytes(self) -> int:
        """What a load counts for at its barrier, outside of the tensor or not."""
        return int(np.prod(self.box)) * self.element

    def lines(self, start: list[int], read: Callable[[int, int], np.ndarray]) -> Iterator[tuple[np.ndarray, int]]:
        """The lines of the box that begins at the coordinates, zeros outside of the tensor, and their numbers."""
        if self.box[0] * self.element != LINE_BYTES:
            raise MachineError(f"a box of {self.box[0] * self.element} bytes a line; {LINE_BYTES} are modelled")
        for number, place in enumerate(np.ndindex(*self.box[:0:-1])):
            at = [start[0], *(first + step for first, step in zip(start[1:], place[::-1], strict=True))]
            inside = all(0 <= index < extent for index, extent in zip(at[1:], self.extents[1:], strict=True))
            line = np.zeros(LINE_BYTES, dtype=np.uint8)
            count = min(self.box[0], self.extents[0] - at[0]) * self.element
            if inside and count > 0:
                where = self.base + at[0] * self.element
                where += sum(index * stride for index, stride in zip(at[1:], self.strides[1:], strict=True))
                line[:count] = read(where, count)
            yield line, number


def operand_places(descriptor: int, rows: np.ndarray, turned: bool) -> np.ndarray:
    """Where rows (of M or N) by 16 (of K) of a matrix lie, in 16-bit elements of shared memory's address space.

    A descriptor has start, leading and stride byte offsets, in units of 16. A row's K lies in a line of 128 bytes,
    eight such lines ``stride`` before the next eight; a turned matrix has lines of 64 rows, ``leading`` before the next
    64, and eight of K ``stride`` before the next.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 62 != 1:
        raise MachineError("only the 128-byte swizzle is modelled")
    mn, k = rows[:, None], np.arange(16)[None, :]
    if turned:
        offset = mn % 64 * 2 + mn // 64 * leading + k % 8 * LINE_BYTES + k // 8 * stride
    else:
        offset = mn % 8 * LINE_BYTES + mn // 8 * stride + k * 2
    return swizzle(start + offset) // 2


def swizzle(address: Any) -> Any:
    """The 128-byte swizzle: which 16 bytes of a line of 128, changed by the line's number among 8."""
    return address ^ ((address >> 7 & 7) << 4)


def unrounded(bits: np.ndarray, element: str) -> np.ndarray:
    """16-bit floats as float32."""
    if element == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
