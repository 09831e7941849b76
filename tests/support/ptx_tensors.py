"""Matrices of ptx_machine: what a TMA descriptor names, and how tensor cores read shared memory."""

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


def operand_places(descriptor: int, rows: np.ndarray, turned: bool, width: int = 2) -> np.ndarray:
    """Where rows (of M or N) by 32 bytes (of K) of a matrix lie: addresses of its elements of ``width`` bytes, in
    shared memory's address space.

    A descriptor has start, leading and stride byte offsets, in units of 16. A row's K lies in a line of 128 bytes,
    eight such lines ``stride`` before the next eight; a turned matrix has lines of 128 bytes of rows, ``leading``
    before the next, and eight of K ``stride`` before the next.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 62 != 1:
        raise MachineError("only the 128-byte swizzle is modelled")
    mn, k = rows[:, None], np.arange(32 // width)[None, :]
    line = LINE_BYTES // width
    if turned:
        offset = mn % line * width + mn // line * leading + k % 8 * LINE_BYTES + k // 8 * stride
    else:
        offset = mn % 8 * LINE_BYTES + mn // 8 * stride + k * width
    return swizzle(start + offset)


def swizzle(address: Any) -> Any:
    """The 128-byte swizzle: which 16 bytes of a line of 128, changed by the line's number among 8."""
    return address ^ ((address >> 7 & 7) << 4)


def narrow(bits: np.ndarray, element: str) -> np.ndarray:
    """Floats of 8 or 16 bits as float32."""
    if element == "e4m3":
        return _E4M3[bits]
    if element == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _e4m3() -> np.ndarray:
    """The value of every byte."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    size[(byte & 127) == 127] = np.nan
    return np.where(byte >> 7, -size, size).astype(np.float32)


_E4M3 = _e4m3()
