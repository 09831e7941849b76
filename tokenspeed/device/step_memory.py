"""The arrays of a step, one behind the other in one piece of memory, so that one copy brings all of them."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.placement import Twin

ALIGNMENT = 16
"""Bytes: what kernels may expect of an array's address."""

_TORCH: dict[type[np.generic], torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
}

_Number = TypeVar("_Number", bound=np.generic)


def aligned(nbytes: int) -> int:
    """``nbytes`` raised to where the next array may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Pair(Generic[_Number]):
    """One array: ``host`` is written, ``tensor`` is what the device reads once it was uploaded."""

    host: NDArray[_Number]
    tensor: torch.Tensor

    @property
    def on_host(self) -> torch.Tensor:
        """``host`` as a tensor: ``tensor`` itself where both are one memory."""
        return self.tensor if self.tensor.device.type == "cpu" else torch.from_numpy(self.host)


class Packing:
    """Gives out parts of ``twin`` from byte ``start`` on, one behind the other.

    Attributes:
        end: the byte behind what was given out so far.
    """

    def __init__(self, twin: Twin, start: int = 0) -> None:
        self._twin = twin
        self.end = start

    def take(self, dtype: type[_Number], count: int) -> Pair[_Number]:
        """The next ``count`` numbers."""
        first, last = self.end, self.end + count * np.dtype(dtype).itemsize
        assert last <= self._twin.host.size, f"a step of {last} bytes in memory of {self._twin.host.size}"
        self.end = aligned(last)
        return Pair(self._twin.host[first:last].view(dtype), self._twin.device[first:last].view(_TORCH[dtype]))

    def copied(self, dtype: type[_Number], values: NDArray[Any]) -> torch.Tensor:
        """The next part, with ``values``."""
        pair = self.take(dtype, values.size)
        pair.host[:] = values
        return pair.tensor
