"""Blackwell's tensor core for ptx_machine: tensor memory, what is read and written of it, and products into it.

After the PTX ISA: an address is a lane in its upper and a column in its lower 16 bits; there are 128 lanes of 512
columns of 32 bits, and a warp reaches the 32 lanes of its number modulo 4. Products take the order in which they were
asked for, and a commit reports that those before it are done. Loaded registers and stored columns are there after the
wait.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from ptx_arithmetic import MachineError
from ptx_memory import OFFSET, RANK_SHIFT
from ptx_tensors import narrow, operand_places

LANES = 128
COLUMNS = 512
WARP_LANES = 32
_FRESH = 0xFFFFFFFF
_ELEMENTS = {"kind::f16": {0: "f16", 1: "bf16"}, "kind::f8f6f4": {0: "e4m3"}}


def _group(instruction: Any) -> int:
    """Blocks that an instruction is of."""
    return 2 if "cta_group::2" in instruction.parts else 1


def _bits(number: int, low: int, count: int) -> int:
    return number >> low & ((1 << count) - 1)


class TensorMemory:
    """The tensor memory of a block; fresh columns hold NaN."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.cells = np.full((LANES, COLUMNS), _FRESH, dtype=np.uint32)
        self.columns = 0
        self.group = 0
        self.used = 0
        self.may_allocate = True
        self.waiting: dict[tuple[int, str], list[Callable[[], None]]] = {}
        self.loading: set[tuple[int, str]] = set()

    def defers(self, warp: Any, move: Callable[[], None], names: list[str], target: str) -> bool:
        """Whether a move waits for a load, as it only renames its registers. The compiler puts such moves before the
        wait."""
        if not any((warp.index, name) in self.loading for name in names):
            return False
        self.loading.add((warp.index, target))
        self.waiting[warp.index, "ld"].append(move)
        return True

    def execute(self, warp: Any, instruction: Any) -> None:
        """One tcgen05 instruction."""
        getattr(self, "_" + instruction.parts[1].split("::")[0])(warp, instruction)

    def _fence(self, warp: Any, instruction: Any) -> None:
        """Order between threads: the machine has it."""

    def _alloc(self, warp: Any, instruction: Any) -> None:
        self._whole(warp)
        count = warp.uniform(instruction.operands[1], "u32")
        if self.columns or not self.may_allocate:
            raise MachineError("tensor memory is allocated twice, or after the right to it was given up")
        if count < 32 or count > COLUMNS or count & (count - 1):
            raise MachineError(f"{count} columns; a power of two from 32 to {COLUMNS} can be had")
        self.columns, self.group = count, _group(instruction)
        address = int(warp.address(instruction.operands[0])[0])
        self.block.memory_at(address, 4, "shared").view(np.uint32)[:] = 0

    def _relinquish_alloc_permit(self, warp: Any, instruction: Any) -> None:
        self._whole(warp)
        self.may_allocate = False

    def _dealloc(self, warp: Any, instruction: Any) -> None:
        self._whole(warp)
        given = (warp.uniform(instruction.operands[0], "u32"), warp.uniform(instruction.operands[1], "u32"))
        if given != (0, self.columns):
            raise MachineError(f"{given} is given back; (0, {self.columns}) was had")
        if any(self.waiting.values()):
            raise MachineError("tensor memory is given back while loads or stores are under way")
        self.columns = 0

    def _ld(self, warp: Any, instruction: Any) -> None:
        names, lanes, columns = self._places(warp, instruction, 0, 1)
        found = self.cells[lanes[:, None], columns].copy()
        for name in names:
            warp.registers.pop(name, None)  # not there before the wait
            self.loading.add((warp.index, name))

        def land() -> None:
            for index, name in enumerate(names):
                warp.write(name, found[:, index])

        self.waiting.setdefault((warp.index, "ld"), []).append(land)

    def _st(self, warp: Any, instruction: Any) -> None:
        names, lanes, columns = self._places(warp, instruction, 1, 0)
        values = np.stack([warp.value(name, "u32") for name in names], axis=1)

        def land() -> None:
            self.cells[lanes[:, None], columns] = values

        self.cells[lanes[:, None], columns] = _FRESH
        self.waiting.setdefault((warp.index, "st"), []).append(land)

    def _wait(self, warp: Any, instruction: Any) -> None:
        self._whole(warp)
        for land in self.waiting.pop((warp.index, instruction.parts[1].removeprefix("wait::")), []):
            land()
        if instruction.parts[1] == "wait::ld":
            self.loading = {one for one in self.loading if one[0] != warp.index}

    def _places(
        self, warp: Any, instruction: Any, registers: int, place: int
    ) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Registers, the lane of each thread, and [thread, register] the column."""
        self._whole(warp)
        shape, times = instruction.parts[4], int(instruction.parts[5].removeprefix("x"))
        names = [name.strip() for name in instruction.operands[registers].strip("{}").split(",")]
        address = int(warp.address(instruction.operands[place])[0])
        if (warp.address(instruction.operands[place]) != address).any() or len(names) != times:
            raise MachineError("lanes give several addresses, or not the registers that the shape takes")
        first, column, thread = address >> 16, address & 0xFFFF, np.arange(WARP_LANES)
        own = WARP_LANES * (warp.index % 4)
        columns = column + np.arange(times)[None, :] + np.zeros((WARP_LANES, 1), dtype=np.int64)
        if shape == "32x32b" and first == own:
            lanes = first + thread
        elif shape == "16x32bx2" and first in (own, own + 16) and registers == 0:
            lanes = first + thread % 16
            columns = columns + thread[:, None] // 16 * int(instruction.operands[2])
        else:
            raise MachineError(f"warp {warp.index} takes {shape} from lane {first} on")
        self._allocated(int(columns.max()) + 1)
        return names, lanes, columns.astype(np.int64)

    def _allocated(self, end: int) -> None:
        if end > self.columns:
            raise MachineError(f"column {end - 1} of tensor memory; {self.columns} are allocated")
        self.used = max(self.used, end)

    def _whole(self, warp: Any) -> None:
        if not warp.mask.all():
            raise MachineError("a part of a warp does what a whole one has to")

    # ----------------------------------------------------------------------------------------------------- products

    def _commit(self, warp: Any, instruction: Any) -> None:
        self._one(warp, instruction)
        address = int(warp.address(instruction.operands[0])[warp.mask][0])
        addresses = [address]
        if "multicast::cluster" in instruction.parts:
            mask = warp.uniform(instruction.operands[1], "u16")
            addresses = [address & OFFSET | rank << RANK_SHIFT for rank in range(16) if mask >> rank & 1]
        barriers = [self.block.barrier_at(one) for one in addresses]

        def arrive() -> None:
            for barrier in barriers:
                barrier.pending -= 1
                barrier.settle()

        self.block.soon("products", arrive)

    def _one(self, warp: Any, instruction: Any) -> None:
        if warp.mask.sum() != 1:
            raise MachineError(f"{warp.mask.sum()} lanes ask for a product; one is meant to")
        group = _group(instruction)
        if self.block.rank % group or any(block.tensor.group != group for block in self._blocks(group)):
            raise MachineError(f"cta_group::{group} by block {self.block.rank}, or with memory of another group")

    def _blocks(self, group: int) -> list[Any]:
        return list(self.block.cluster[self.block.rank : self.block.rank + group])

    def _mma(self, warp: Any, instruction: Any) -> None:
        """D = A B or D += A B, both in shared memory, by a block or by a pair."""
        self._one(warp, instruction)
        target, left, right, shape, lanes_off, adds = instruction.operands
        if any(warp.uniform(name.strip(), "u32") for name in lanes_off.strip("{}").split(",")):
            raise MachineError("output lanes are disabled, which is not modelled")
        address = int(warp.address(target)[warp.mask][0])
        described = warp.uniform(shape, "u32")
        descriptors = (warp.uniform(left, "u64"), warp.uniform(right, "u64"))
        accumulates = bool(warp.value(adds, "pred")[warp.mask][0])
        kind = next(part for part in instruction.parts if part.startswith("kind::"))
        group = _group(instruction)
        self.block.soon("products", lambda: self._product(group, kind, address, descriptors, described, accumulates))

    def _product(
        self, group: int, kind: str, address: int, descriptors: tuple[int, int], described: int, accumulates: bool
    ) -> None:
        """What the instruction descriptor and those of both operands say. Each block of a pair has half of the rows of
        A and D, and half of the columns of B."""
        rows, columns = _bits(described, 24, 5) << 4, _bits(described, 17, 6) << 3
        elements = [_ELEMENTS[kind].get(_bits(described, place, 3)) for place in (7, 10)]
        if _bits(described, 4, 2) != 1 or None in elements or _bits(described, 13, 2) or _bits(described, 0, 4):
            raise MachineError(f"the instruction descriptor {described:#x}: only plain sums in float32 are modelled")
        if columns % (8 * group) or not 8 * group <= columns <= 256:
            raise MachineError(f"a product of {columns} columns")
        turned = [bool(_bits(described, place, 1)) for place in (15, 16)]
        blocks = self._blocks(group)
        b = np.concatenate(
            [
                block.tensor.operand(descriptors[1], np.arange(columns // group), turned[1], elements[1])
                for block in blocks
            ]
        )
        for block in blocks:
            a = block.tensor.operand(descriptors[0], np.arange(rows // group), turned[0], elements[0])
            with np.errstate(all="ignore"):
                block.tensor.add(address, rows, group, a.astype(np.float64) @ b.astype(np.float64).T, accumulates)

    def add(self, address: int, rows: int, group: int, product: np.ndarray, accumulates: bool) -> None:
        """A block's rows of a product into its tensor memory."""
        first, column, width = address >> 16, address & 0xFFFF, product.shape[1]
        row = np.arange(len(product))[:, None]
        lanes, columns = row, column + np.arange(width)[None, :]
        if group == 1 and rows == 64 and first in (0, 16):
            lanes = first + row // 16 * WARP_LANES + row % 16
        elif group == 2 and rows == 128 and first == 0:
            lanes = row + 64 * (np.arange(width)[None, :] // (width // 2))
            columns = column + np.arange(width)[None, :] % (width // 2)
        elif group != 1 or rows != 128 or first:
            raise MachineError(f"a product of {rows} rows into lanes from {first} on")
        self._allocated(int(columns.max()) + 1)
        cells = self.cells.view(np.float32)
        old = cells[lanes, columns] if accumulates else 0.0
        cells[lanes, columns] = (old + product).astype(np.float32)

    def operand(self, descriptor: int, rows: np.ndarray, turned: bool, element: str) -> np.ndarray:
        """Rows by 32 bytes of depth, from shared memory, as float32."""
        if _bits(descriptor, 46, 2) != 1 or _bits(descriptor, 61, 3) != 2 or _bits(descriptor, 49, 3):
            raise MachineError(
                f"the descriptor {descriptor:#x}: only the 128-byte swizzle from aligned lines is modelled"
            )
        places = operand_places(descriptor, rows, turned, 1 if element == "e4m3" else 2)
        return narrow(self.block.shared_elements(places, element), element)
