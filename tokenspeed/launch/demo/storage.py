"""The demo's disk: it remembers which blocks it was given, and answers after a while."""

import heapq
from collections import OrderedDict

import numpy as np

from tokenspeed.device.handle import OperationOutcome, StorageUsage
from tokenspeed.launch.demo.clock import DemoClock
from tokenspeed_scheduler import CacheOperation, OperationKind

SECONDS = {
    OperationKind.STORAGE_QUERY: 1e-3,
    OperationKind.STORAGE_FETCH: 8e-3,
    OperationKind.STORAGE_PUT: 15e-3,
}
"""Of one operation."""


class DemoStorage:
    """Of the blocks it was given, those that were used last; ``limit`` and ``block_bytes`` say how many."""

    def __init__(self, clock: DemoClock, limit: int, block_bytes: int) -> None:
        self._clock = clock
        self._limit = limit
        self._block_bytes = block_bytes
        self._blocks: OrderedDict[tuple[bytes, int, int], None] = OrderedDict()
        self._due: list[tuple[float, int, CacheOperation]] = []

    def take(self, operation: CacheOperation) -> None:
        """Begins an operation of the kinds in SECONDS."""
        heapq.heappush(self._due, (self._clock.now + SECONDS[operation.kind], operation.op_id, operation))

    def finished(self) -> list[OperationOutcome]:
        """What has ended by now, in the order in which it did."""
        outcomes = []
        while self._due and self._due[0][0] <= self._clock.now:
            operation = heapq.heappop(self._due)[2]
            outcomes.append(OperationOutcome(op_id=operation.op_id, succeeded=self._carry_out(operation)))
        return outcomes

    def usage(self) -> StorageUsage:
        """How full it is."""
        size = self._block_bytes
        return StorageUsage(blocks=len(self._blocks), bytes=len(self._blocks) * size, limit_bytes=self._limit * size)

    def _carry_out(self, operation: CacheOperation) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        digests, groups, offsets = operation.digests, operation.group.tolist(), operation.offsets.tolist()
        parts = zip(digests, groups, offsets, strict=True)
        keys = [(digest.tobytes(), group, offset) for digest, group, offset in parts]
        if operation.kind == OperationKind.STORAGE_PUT:
            for key in keys:
                self._blocks[key] = None
                self._blocks.move_to_end(key)
            while len(self._blocks) > self._limit:
                self._blocks.popitem(last=False)
        return np.array([key in self._blocks for key in keys], np.uint8)
