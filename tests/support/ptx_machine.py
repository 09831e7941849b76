"""Runs a compiled kernel's PTX without a GPU: a block's warps by numpy, 32 lanes at a time.

What it covers is what kernel-backends/mla compiles to: integer and float32 arithmetic, shared and global memory, named
barriers, mbarriers, TMA tile loads with the 128-byte swizzle, wgmma on 16-bit operands in shared memory, and tcgen05
with tensor memory (ptx_tensor_memory). It follows the PTX ISA on layouts: shared-memory matrix descriptors, the
fragments of wgmma, the swizzle as a function of the address.

Lanes that branch apart run from the least place in the text on, each mask by itself. Loads by TMA and products of
tcgen05, which nobody sees end but by an mbarrier, are done at once, or, where a block is ``late`` with them, only when
no warp gets on without them: what reads before it has waited finds NaN or what was there before. Other accesses happen
at once and in the order of issue. A product that reads what a warp wrote and no fence brought to the other proxy is an
error; other missing fences are not found. An access outside of the memory it was given raises MachineError, and fresh
shared memory holds NaN.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from ptx_arithmetic import ARITHMETIC, MachineError, bits_of, typed
from ptx_memory import LANES, OFFSET, RANK_SHIFT, Barrier, Memory
from ptx_program import Instruction, Program
from ptx_synchronisation import Synchronisation
from ptx_tensor_memory import TensorMemory
from ptx_tensors import LINE_BYTES, TensorMap, narrow, operand_places, swizzle

SHARED_BASE = 1024
PARAM_BASE = 1 << 60
PARAM_STRIDE = 4096
_ALL = np.ones(LANES, dtype=bool)


class Warp:
    """32 lanes: registers by name, and where each lane is."""

    def __init__(self, block: "Block", index: int) -> None:
        self.block, self.index = block, index
        self.registers: dict[str, np.ndarray] = {}
        self.places = np.zeros(LANES, dtype=np.int64)
        self.mask = _ALL
        self.waits_at = ""
        self.cluster_turn = 0
        self.released = not block.program.waits_for_grid
        lanes = np.arange(LANES, dtype=np.uint32) + LANES * index
        rank = np.full(LANES, block.rank, dtype=np.uint32)
        self.special = {"%tid.x": lanes, "%laneid": lanes % LANES, "%cluster_ctarank": rank}
        for axis, number in zip("xyz", block.position, strict=True):
            self.special[f"%ctaid.{axis}"] = np.full(LANES, number, dtype=np.uint32)

    def value(self, operand: str, kind: str) -> np.ndarray:
        """An operand's 32 values as ``kind`` (such as "s32", "b64", "f32", "pred")."""
        if operand in self.special:
            return typed(self.special[operand], kind)
        if operand in self.registers:
            return typed(self.registers[operand], kind)
        if operand in self.block.parameter_places:
            number = self.block.parameter_places[operand]
        elif operand.startswith("__dynamic_shmem__"):
            number = SHARED_BASE + (self.block.rank << RANK_SHIFT)
        elif operand.startswith("0f"):
            number = int(operand[2:], 16)
        elif operand.lstrip("-").isdigit():
            number = int(operand) & (2**64 - 1)
        else:
            raise MachineError(f"register {operand} is read before it is written")
        return typed(np.full(LANES, number, dtype=np.uint64), kind)

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes the lanes of the mask. Values are kept as unsigned bits of their own width."""
        if name == "_":
            return
        bits = value if value.dtype == bool else bits_of(value)
        old = self.registers.get(name)
        if old is not None and self.mask is not _ALL:
            if old.dtype != bits.dtype:
                width = max(old.dtype, bits.dtype, key=lambda kind: kind.itemsize)
                old, bits = old.astype(width), bits.astype(width)
            bits = np.where(self.mask, bits, old)
        self.registers[name] = bits.copy()

    def uniform(self, operand: str, kind: str) -> int:
        """The one value of the lanes of the mask; MachineError where they differ."""
        values = self.value(operand, kind)[self.mask]
        if (values != values[0]).any():
            raise MachineError(f"{operand} differs between lanes")
        return int(values[0])

    def address(self, operand: str) -> np.ndarray:
        """Of ``[register+number]``, for every lane."""
        name, _, offset = operand.strip("[]").partition("+")
        return self.value(name.strip(), "u64") + np.uint64(int(offset or 0) & (2**64 - 1))

    def run(self) -> Iterator[None]:
        """Yields where it has to wait."""
        program, ends = self.block.program, len(self.block.program.instructions)
        while True:
            place = int(self.places.min())
            here = self.places == place
            if here.all():
                self.mask = _ALL
                while place < ends and program.instructions[place].is_straight:
                    yield from self.block.execute(self, program.instructions[place])
                    place += 1
                self.places[:] = place
            if place >= ends:
                return
            instruction = program.instructions[place]
            self.mask = here
            if instruction.guard is not None:
                holds = self.value(instruction.guard[0], "pred")
                self.mask = here & (~holds if instruction.guard[1] else holds)
            self.places[here] = place + 1
            if not self.mask.any():
                continue
            if instruction.parts[0] == "bra":
                self.places[self.mask] = program.labels[instruction.operands[0]]
            elif instruction.parts[0] == "ret":
                self.places[self.mask] = ends
            else:
                yield from self.block.execute(self, instruction)


class Block(Synchronisation):
    """One block of a launch. ``parameters`` are bytes, or a TensorMap, in the order of the kernel; ``late``: how it
    runs, see ptx_cluster.run; ``rank``: its number in its cluster, whose blocks see each other's shared memory."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        parameters: list[bytes | TensorMap],
        position: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        late: tuple[str, ...] = (),
        rank: int = 0,
    ) -> None:
        self.program, self.memory, self.position, self.rank = program, memory, position, rank
        self.cluster = [self]
        self.moves = 0  # waits that have ended
        if len(parameters) != len(program.parameters):
            raise MachineError(f"{len(parameters)} parameters given; the kernel has {len(program.parameters)}")
        self.parameter_places = {name: PARAM_BASE + PARAM_STRIDE * i for i, name in enumerate(program.parameters)}
        self.parameters = parameters
        self.shared = np.full(shared_bytes, 0xFF, dtype=np.uint8)
        self.shared_used = 0
        # Of each byte, 1 more than the warp that wrote it, until its fence makes it visible to the other proxy.
        self.written = np.zeros(shared_bytes, dtype=np.uint8)
        self.tensor = TensorMemory(self)
        self.late = late
        self.under_way: dict[str, deque[Callable[[], None]]] = {"loads": deque(), "products": deque()}
        self.barriers: dict[int, Barrier] = {}
        self.waiting: dict[int, set[int]] = {}
        self.rounds: dict[int, int] = {}
        self.warps = [Warp(self, index) for index in range(threads // LANES)]

    def soon(self, queue: str, action: Callable[[], None]) -> None:
        """Does what runs by itself: at once, or when nothing else can be done."""
        if queue in self.late:
            self.under_way[queue].append(action)
        else:
            action()

    def execute(self, warp: Warp, instruction: Instruction) -> Iterator[None]:
        """Does one instruction for the lanes of the warp's mask."""
        name = instruction.parts[0]
        handler = getattr(self, f"_{name}", None)
        warp.waits_at = instruction.text
        try:
            if handler is not None:
                waits = handler(warp, instruction)
                if waits is not None:
                    yield from waits
            elif name in ARITHMETIC:
                self._compute(warp, instruction)
            else:
                raise MachineError("no such instruction here")
        except MachineError as error:
            raise MachineError(f"{instruction.text[:200]}: {error}") from error

    def _compute(self, warp: Warp, instruction: Instruction) -> None:
        function = ARITHMETIC[instruction.parts[0]]
        if instruction.parts[0] == "mov" and self.tensor.loading and warp.mask.all():
            target, *sources = instruction.operands
            names = [name.strip() for source in sources for name in source.strip("{}").split(",")]
            if self.tensor.defers(warp, lambda: function(warp, instruction), names, target):
                return
        function(warp, instruction)

    # ------------------------------------------------------------------------------------------------------- memory

    def memory_at(self, address: int, count: int, space: str) -> np.ndarray:
        if space == "shared":
            if address >> RANK_SHIFT != self.rank:
                return self.peer(address).memory_at(address, count, space)
            start = (address & OFFSET) - SHARED_BASE
            if start < 0 or start + count > len(self.shared):
                raise MachineError(f"shared memory at {start} for {count} bytes: there are {len(self.shared)}")
            self.shared_used = max(self.shared_used, start + count)
            return self.shared[start : start + count]
        if space == "param":
            index, offset = divmod(address - PARAM_BASE, PARAM_STRIDE)
            given = self.parameters[index]
            if isinstance(given, TensorMap) or offset + count > len(given):
                raise MachineError(f"parameter {index} has no {count} bytes at {offset}")
            return np.frombuffer(given, dtype=np.uint8)[offset : offset + count]
        return self.memory.locate(address, count)

    def _vector(self, instruction: Instruction) -> tuple[int, int]:
        """Elements and bytes of one: of ``ld.global.v4.b32`` 4 and 4."""
        vector = next((int(part[1:]) for part in instruction.parts if re.fullmatch(r"v[248]", part)), 1)
        return vector, int(instruction.parts[-1][1:]) // 8

    def _ld(self, warp: Warp, instruction: Instruction) -> None:
        space = instruction.parts[1]
        self._look(warp, space)
        count, width = self._vector(instruction)
        targets = instruction.operands[0].strip("{}").split(",")
        addresses = warp.address(instruction.operands[1])
        values = np.zeros((count, LANES), dtype=f"u{width}")
        for lane in np.flatnonzero(warp.mask):
            found = self._aligned(int(addresses[lane]), count * width, space)
            values[:, lane] = found.view(f"u{width}")
        for target, value in zip(targets, values, strict=True):
            warp.write(target.strip(), value)

    def _st(self, warp: Warp, instruction: Instruction) -> None:
        space = instruction.parts[1]
        self._look(warp, space)
        count, width = self._vector(instruction)
        sources = [name.strip() for name in instruction.operands[1].strip("{}").split(",")]
        values = np.stack([warp.value(name, f"u{8 * width}") for name in sources])
        addresses = warp.address(instruction.operands[0])
        for lane in np.flatnonzero(warp.mask):
            address = int(addresses[lane])
            self._aligned(address, count * width, space).view(f"u{width}")[:] = values[:, lane]
            if space == "shared":
                if address >> RANK_SHIFT != self.rank:
                    raise MachineError("a store to another block's shared memory is not modelled")
                self.written[(address & OFFSET) - SHARED_BASE :][: count * width] = warp.index + 1

    def _aligned(self, address: int, count: int, space: str) -> np.ndarray:
        if address % count and space != "param":
            raise MachineError(f"address {address:#x} is no multiple of {count}")
        return self.memory_at(address, count, space)

    def _cp(self, warp: Warp, instruction: Instruction) -> None:
        """cp.async.bulk.tensor, of one box by one lane."""
        self._look(warp, "global")
        target, source, barrier = instruction.operands[:3]
        name, coordinates = re.fullmatch(r"\[(%\w+), \{([^}]*)\}\]", source).groups()  # type: ignore[union-attr]
        if warp.mask.sum() != 1:
            raise MachineError(f"{warp.mask.sum()} lanes load; one is meant to")
        tensor = self.parameters[(warp.uniform(name, "u64") - PARAM_BASE) // PARAM_STRIDE]
        if not isinstance(tensor, TensorMap):
            raise MachineError("the parameter is no tensor map")
        start = [warp.uniform(part.strip(), "s32") for part in coordinates.split(",")]
        address = int(warp.address(target)[warp.mask][0])
        if address % 1024:
            raise MachineError(f"a swizzled box at {address:#x}, which is no multiple of 1024")
        found = self.barrier_at(int(warp.address(barrier)[warp.mask][0]))

        def land() -> None:
            for line, place in tensor.lines(start, lambda at, count: self.memory_at(at, count, "global")):
                for chunk in range(0, LINE_BYTES, 16):
                    to = int(swizzle(address + place * LINE_BYTES + chunk))
                    self.memory_at(to, 16, "shared")[:] = line[chunk : chunk + 16]
                    self.written[(to & OFFSET) - SHARED_BASE :][:16] = 0
            found.bytes -= tensor.box_bytes
            found.settle()

        self.soon("loads", land)

    # ----------------------------------------------------------------------------------------------------- the rest

    def _setmaxnreg(self, warp: Warp, instruction: Instruction) -> None:
        """Registers are enough here."""

    def _griddepcontrol(self, warp: Warp, instruction: Instruction) -> None:
        if instruction.parts[1] == "wait":
            warp.released = True

    def _look(self, warp: Warp, space: str) -> None:
        if space == "global" and not warp.released:
            raise MachineError("global memory, before what the kernel before this one writes is waited for")

    def _tcgen05(self, warp: Warp, instruction: Instruction) -> None:
        self.tensor.execute(warp, instruction)

    def shared_elements(self, places: np.ndarray, element: str) -> np.ndarray:
        """What a tensor core reads at these addresses of shared memory, as unsigned bits."""
        offsets, width = places - SHARED_BASE, 1 if element == "e4m3" else 2
        if offsets.min() < 0 or offsets.max() + width > len(self.shared):
            raise MachineError(f"an operand lies at {offsets.min()} to {offsets.max()} of shared memory")
        self.shared_used = max(self.shared_used, int(offsets.max()) + width)
        writers = set(self.written[offsets].flat) - {0}
        if writers:
            raise MachineError(f"warp {writers.pop() - 1} wrote an operand, and no fence brought it to the other proxy")
        return self.shared.view(f"u{width}")[offsets // width]

    # -------------------------------------------------------------------------------------------------------- wgmma

    def _wgmma(self, warp: Warp, instruction: Instruction) -> None:
        """A warp's 16 rows of D += A B, A in shared memory or in registers, B in shared memory; fence, commit and wait
        are nothing here."""
        if instruction.parts[1] != "mma_async":
            return
        if not warp.mask.all():
            raise MachineError("a part of a warp multiplies")
        rows, columns = (int(n) for n in re.fullmatch(r"m(\d+)n(\d+)k16", instruction.parts[4]).groups())  # type: ignore[union-attr]
        registers, left, right, adds, scale_a, scale_b, *turn_a, turn_b = instruction.operands
        if (scale_a, scale_b) != ("1", "1") or rows != 64:
            raise MachineError("only m64 with scales 1 is modelled")
        element = instruction.parts[6]
        if turn_a:
            own = np.arange(16) + 16 * (warp.index % 4)
            places = operand_places(warp.uniform(left, "u64"), own, turn_a == ["1"])
            a = narrow(self.shared_elements(places, element), element)
        else:
            a = self._fragment(warp, left, element)
        places = operand_places(warp.uniform(right, "u64"), np.arange(columns), turn_b == "1")
        b = narrow(self.shared_elements(places, element), element)
        product = a.astype(np.float64) @ b.astype(np.float64).T
        lane, names = np.arange(LANES), [name.strip() for name in registers.strip("{}").split(",")]
        keeps = warp.value(adds, "pred")
        for index, name in enumerate(names):
            row, column = lane // 4 + 8 * (index // 2 % 2), 8 * (index // 4) + 2 * (lane % 4) + index % 2
            old = np.where(keeps, warp.value(name, "f32"), np.float32(0.0))
            warp.write(name, (old + product[row, column]).astype(np.float32))

    def _fragment(self, warp: Warp, registers: str, element: str) -> np.ndarray:
        """A warp's 16 rows of 16 elements, which lie in four registers of two elements each."""
        found = np.zeros((16, 16), dtype=np.float32)
        lane = np.arange(LANES)
        for index, name in enumerate(registers.strip("{}").split(",")):
            pair = warp.value(name.strip(), "u32")
            row, column = lane // 4 + 8 * (index % 2), 2 * (lane % 4) + 8 * (index // 2)
            for half in range(2):
                found[row, column + half] = narrow((pair >> np.uint32(16 * half)).astype(np.uint16), element)
        return found
