"""Carries out the cache operations of a plan at their place in the step; CacheOperation says what each kind means."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from tokenspeed.device.cache_arena import CacheArena
from tokenspeed.device.handle import OperationOutcome
from tokenspeed.device.host_arena import HostArena
from tokenspeed.device.placement import Placement
from tokenspeed.device.storage.tier import STORAGE_KINDS, StorageTier
from tokenspeed.layers.communication import ALONE, Communication
from tokenspeed_scheduler import CacheOperation, OperationKind

logger = logging.getLogger(__name__)

SAVES = (OperationKind.WRITE_BACK, OperationKind.IMAGE_SAVE)
LOADS = (OperationKind.LOAD_BACK, OperationKind.RESTORE)
TRANSFERS = (OperationKind.HAND_OFF, OperationKind.REMOTE_PREFILL)


class CacheOperations:
    """The copies between the device arena and the tiers behind it. Runs on the forward thread.

    A copy that fails is an outcome, never an exception: the step goes on, and whoever waits for the block is told.
    Copies are asynchronous, on a stream of their own that keeps its place among what the step does: what is issued
    behind a call here sees its copies done. The host does not wait for them before ``wait``.
    """

    def __init__(
        self,
        placement: Placement,
        arena: CacheArena,
        host: HostArena | None,
        storage: StorageTier | None,
        communication: Communication = ALONE,
    ) -> None:
        self._placement = placement
        self._copied = placement.mark()
        self._arena = arena
        self._host = host
        self._storage = storage
        self._communication = communication

    def save(self, operations: Sequence[CacheOperation]) -> list[OperationOutcome]:
        """Copies to the host, before anything of the step is written, and starts the storage operations, which may put
        what was just saved. What cannot be done here at all ends as failed."""
        outcomes = self._copies(operations, SAVES)
        for operation in operations:
            copied = operation.kind in (*SAVES, *LOADS) and self._host is not None
            if not copied and operation.kind not in STORAGE_KINDS:
                outcomes.append(_impossible(operation))
        if any(operation.kind in STORAGE_KINDS for operation in operations):
            self.wait()  # the threads of the storage read what was saved
        for operation in operations:
            if operation.kind in STORAGE_KINDS:
                if self._storage is None:
                    outcomes.append(_impossible(operation))
                else:
                    self._storage.start(operation)
        return outcomes

    def load(self, operations: Sequence[CacheOperation]) -> list[OperationOutcome]:
        """Copies from the host, once zeroing and copying are done and before the batch reads."""
        return self._copies(operations, LOADS)

    def _copies(self, operations: Sequence[CacheOperation], kinds: Sequence[OperationKind]) -> list[OperationOutcome]:
        """Those of ``kinds``, SAVES or LOADS."""
        host, arena = self._host, self._arena
        wanted = [] if host is None else [operation for operation in operations if operation.kind in kinds]
        if host is None or not wanted:
            return []
        copy = host.save if kinds is SAVES else host.load
        with self._placement.copying():
            outcomes = [
                OperationOutcome(op_id=each.op_id, succeeded=copy(arena, each.group, each.source, each.target))
                for each in wanted
            ]
            self._copied.set()
        return outcomes

    def wait(self) -> None:
        """Returns once every copy is done that was started: its outcome may be told."""
        self._copied.wait()

    def agreed(
        self, operations: Sequence[CacheOperation], outcomes: Sequence[OperationOutcome]
    ) -> tuple[OperationOutcome, ...]:
        """The same once every rank has made its copies: a block is there where all of them have their part of it."""
        if self._communication.world == 1:
            return tuple(outcomes)
        sizes = {operation.op_id: _count(operation) for operation in operations}
        counts = [sizes[outcome.op_id] for outcome in outcomes]
        flags = [
            np.ones(count, np.uint8) if outcome.succeeded is None else outcome.succeeded
            for outcome, count in zip(outcomes, counts, strict=True)
        ]
        everywhere = torch.from_numpy(np.concatenate(flags))
        self._communication.minimum(everywhere)
        parts = np.split(everywhere.numpy(), np.cumsum(counts)[:-1])
        return tuple(
            OperationOutcome(op_id=outcome.op_id, succeeded=None if part.all() else part)
            for outcome, part in zip(outcomes, parts, strict=True)
        )


def _impossible(operation: CacheOperation) -> OperationOutcome:
    """Fails an operation for which this device side has no tier: scheduler and device were not built for each other."""
    logger.error("%s needs a tier that this device side has not", OperationKind(operation.kind).name)
    return OperationOutcome(op_id=operation.op_id, succeeded=np.zeros(_count(operation), np.uint8))


def _count(operation: CacheOperation) -> int:
    """Blocks or keys of an operation."""
    return max(int(operation.group.size), int(operation.digests.shape[0]))
