"""What blocks of ptx_machine share: the device's memory, and barriers in shared memory."""

import ctypes
from dataclasses import dataclass, field

import numpy as np
from ptx_arithmetic import MachineError

LANES = 32
"""Of a warp."""

RANK_SHIFT = 24
"""Of an address of shared memory: the bits from here on say which block of a cluster it is of."""

OFFSET = (1 << RANK_SHIFT) - 1
"""The other bits."""


@dataclass
class Memory:
    """The device's memory: what was lent of this process's, and nothing else."""

    regions: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def lend(self, address: int, count: int) -> None:
        """Lets a kernel have ``count`` bytes of this process's memory."""
        if count > 0:
            self.regions.append((address, np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))))

    def locate(self, address: int, count: int) -> np.ndarray:
        """The ``count`` bytes from ``address`` on, to read or to write."""
        for base, flat in self.regions:
            if base <= address and address + count <= base + len(flat):
                return flat[address - base : address - base + count]
        raise MachineError(f"global memory at {address:#x} for {count} bytes: nothing is there")


@dataclass
class Barrier:
    """An mbarrier: arrivals it waits for in each phase, and bytes still to come."""

    count: int
    pending: int
    phase: int = 0
    bytes: int = 0

    def settle(self) -> None:
        if self.pending < 0:
            raise MachineError("more arrivals at an mbarrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
