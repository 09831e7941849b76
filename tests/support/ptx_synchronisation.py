"""How threads of ptx_machine wait for each other: mbarriers, named barriers, the cluster's, and a warp's exchanges."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from ptx_arithmetic import MachineError
from ptx_memory import LANES, OFFSET, RANK_SHIFT, Barrier
from ptx_program import Instruction

ALL = np.ones(LANES, dtype=bool)


class Synchronisation:
    """A part of ptx_machine.Block: instructions by the first word of their name."""

    moves: int
    barriers: dict[int, Barrier]
    waiting: dict[int, set[int]]
    rounds: dict[int, int]
    warps: list[Any]
    cluster: list[Any]
    written: np.ndarray

    def memory_at(self, address: int, count: int, space: str) -> np.ndarray:
        """Bytes of a memory, to read or to write."""
        raise NotImplementedError

    def peer(self, address: int) -> Any:
        """The block of the cluster that an address of shared memory is of."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.cluster):
            raise MachineError(f"shared memory of block {rank} of a cluster of {len(self.cluster)}")
        return self.cluster[rank]

    def barrier_at(self, address: int) -> Barrier:
        barriers = self.peer(address).barriers
        if address not in barriers:
            raise MachineError(f"no mbarrier was made at {address}")
        return barriers[address]

    def _mapa(self, warp: Any, instruction: Instruction) -> None:
        target, source, rank = instruction.operands
        warp.write(target, (warp.value(source, "u32") & OFFSET) | (warp.value(rank, "u32") << RANK_SHIFT))

    def _barrier(self, warp: Any, instruction: Instruction) -> Iterator[None] | None:
        """barrier.cluster.arrive and wait, of all threads of the cluster."""
        if not warp.mask.all():
            raise MachineError("a part of a warp is at the cluster's barrier")
        if instruction.parts[2] == "arrive":
            warp.cluster_turn += 1
            return None
        return self._await_cluster(warp)

    def _await_cluster(self, warp: Any) -> Iterator[None]:
        while any(other.cluster_turn < warp.cluster_turn for block in self.cluster for other in block.warps):
            yield
        self.moves += 1

    def _mbarrier(self, warp: Any, instruction: Instruction) -> Iterator[None] | None:
        kind, operands = instruction.parts[1], instruction.operands
        if kind == "try_wait":
            return self._wait(warp, operands)
        index = 0 if kind == "init" else 1
        for lane in np.flatnonzero(warp.mask):
            address, number = (
                int(warp.address(operands[index])[lane]),
                int(warp.value(operands[index + 1], "u32")[lane]),
            )
            if kind == "init":
                self.memory_at(address, 8, "shared")
                self.barriers[address] = Barrier(number, number)
                continue
            barrier = self.barrier_at(address)
            expects = "expect_tx" in instruction.parts
            barrier.bytes += number if expects else 0
            barrier.pending -= 1 if expects else number
            barrier.settle()
        return None

    def _wait(self, warp: Any, operands: tuple[str, ...]) -> Iterator[None]:
        barrier = self.barrier_at(int(warp.address(operands[1])[warp.mask][0]))
        parity = warp.uniform(operands[2], "u32")
        while barrier.phase == parity:
            yield
        warp.write(operands[0], ALL)
        self.moves += 1

    def _bar(self, warp: Any, instruction: Instruction) -> Iterator[None]:
        if not warp.mask.all():
            raise MachineError("a part of a warp waits at a barrier")
        if instruction.parts[1] == "warp":
            return
        number = int(instruction.operands[0])
        threads = int(instruction.operands[1]) if len(instruction.operands) > 1 else LANES * len(self.warps)
        waiting, turn = self.waiting.setdefault(number, set()), self.rounds.get(number, 0)
        waiting.add(warp.index)
        if len(waiting) * LANES == threads:
            waiting.clear()
            self.rounds[number] = turn + 1
        while self.rounds.get(number, 0) == turn:
            yield
        self.moves += 1

    def _elect(self, warp: Any, instruction: Instruction) -> None:
        chosen = np.zeros(LANES, dtype=bool)
        chosen[np.flatnonzero(warp.mask)[0]] = True
        warp.write(instruction.operands[0].split("|")[1], chosen)

    def _shfl(self, warp: Any, instruction: Instruction) -> None:
        target, source, amount = instruction.operands[:3]
        lanes, number = np.arange(LANES), warp.uniform(amount, "u32")
        where = lanes ^ number if "bfly" in instruction.parts else np.full(LANES, number)
        if not warp.mask[where[warp.mask]].all():
            raise MachineError("a shuffle reads a lane that is not there")
        warp.write(target.split("|")[0], warp.value(source, "u32")[where])

    def _vote(self, warp: Any, instruction: Instruction) -> None:
        target, source = instruction.operands[:2]
        agree = np.any if "any" in instruction.parts else np.all
        warp.write(target, np.full(LANES, agree(warp.value(source, "pred")[warp.mask])))

    def _fence(self, warp: Any, instruction: Instruction) -> None:
        """Memory is in order here, but for what tensor cores read."""
        if instruction.parts[1:3] == ("proxy", "async"):
            if not warp.mask.all():
                raise MachineError("a part of a warp brings its writes to the other proxy")
            self.written[self.written == warp.index + 1] = 0
