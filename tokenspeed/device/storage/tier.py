"""The storage tier as the runner sees it: operations are started here and end on their own threads."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import OperationOutcome, StorageUsage
from tokenspeed.device.host_arena import HostArena
from tokenspeed.device.storage.backend import BlockKey, StorageBackend
from tokenspeed.device.storage.threads import StorageThreads
from tokenspeed_scheduler import CacheOperation, OperationKind

STORAGE_KINDS = (OperationKind.STORAGE_QUERY, OperationKind.STORAGE_FETCH, OperationKind.STORAGE_PUT)
"""In the order of their urgency: for the first two a request waits."""


class StorageTier:
    """A backend over the blocks of the host arena, which the scheduler pins until an operation was told to have ended.

    ``group_ids`` are in plan order.
    """

    def __init__(self, backend: StorageBackend, host: HostArena, group_ids: Sequence[str]) -> None:
        self._backend = backend
        self._host = host
        self._group_ids = tuple(group_ids)
        self._threads = StorageThreads()

    def start(self, operation: CacheOperation) -> None:
        """Queues a storage operation; never waits."""
        rank, count = STORAGE_KINDS.index(operation.kind), int(operation.digests.shape[0])
        self._threads.submit(operation.op_id, rank, count, lambda: self._run(operation))

    def finished(self) -> list[OperationOutcome]:
        """The operations that ended since this was last asked; never waits. Any thread may ask."""
        return self._threads.finished()

    def usage(self) -> StorageUsage:
        """What the backend has; never waits. Any thread may ask."""
        return self._backend.usage()

    def shutdown(self) -> None:
        """Works off what was queued and ends the threads. May be called twice."""
        self._threads.shutdown()

    def _run(self, operation: CacheOperation) -> NDArray[np.uint8]:
        groups = operation.group.tolist()
        keys = [
            BlockKey(digest.tobytes(), self._group_ids[group], offset)
            for digest, group, offset in zip(operation.digests, groups, operation.offsets.tolist(), strict=True)
        ]
        if operation.kind == OperationKind.STORAGE_QUERY:
            return self._backend.query(keys)
        fetch = operation.kind == OperationKind.STORAGE_FETCH
        blocks = operation.target if fetch else operation.source
        buffers = [self._host.buffer(group, block) for group, block in zip(groups, blocks.tolist(), strict=True)]
        return self._backend.get(keys, buffers) if fetch else self._backend.put(keys, buffers)
