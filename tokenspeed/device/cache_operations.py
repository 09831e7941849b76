"""Carries out the cache operations of a plan at their place in the step; CacheOperation says what each kind means."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tokenspeed.device.cache_arena import CacheArena
from tokenspeed.device.handle import OperationOutcome
from tokenspeed.device.host_arena import HostArena
from tokenspeed.device.placement import Mark, Placement
from tokenspeed.device.storage.tier import STORAGE_KINDS, StorageTier
from tokenspeed.layers.communication import ALONE, Communication
from tokenspeed_scheduler import CacheOperation, OperationKind

logger = logging.getLogger(__name__)

SAVES = (OperationKind.WRITE_BACK, OperationKind.IMAGE_SAVE)
LOADS = (OperationKind.LOAD_BACK, OperationKind.RESTORE)
TRANSFERS = (OperationKind.HAND_OFF, OperationKind.REMOTE_PREFILL)
LOOKUPS = (OperationKind.STORAGE_QUERY, OperationKind.STORAGE_FETCH)
PUTS = (OperationKind.STORAGE_PUT,)


@dataclass(slots=True)
class StepCopies:
    """What one step copies between device and host, on its way.

    Attributes:
        operations: all of its plan.
        outcomes: of those that end with the step; they may be told once ``CacheOperations.end`` returned.
        copied: behind the copies; None before there are any.
    """

    operations: Sequence[CacheOperation]
    outcomes: list[OperationOutcome] = field(default_factory=list)
    copied: Mark | None = None


class CacheOperations:
    """The copies between the device arena and the tiers behind it. Runs on the forward thread.

    A copy that fails is an outcome, never an exception: the step goes on, and whoever waits for the block is told.
    Copies are asynchronous, on a stream of their own that keeps its place among what the step does: what is issued
    behind a call here sees its copies done. The host does not wait for them before ``end``.
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
        self._arena = arena
        self._host = host
        self._storage = storage
        self._communication = communication

    def save(self, operations: Sequence[CacheOperation]) -> StepCopies:
        """Copies to the host, before anything of the step is written, and has the storage look up and fetch. What
        cannot be done here at all ends as failed."""
        copies = StepCopies(operations)
        if not operations:
            return copies
        self._copy(copies, SAVES)
        for operation in operations:
            tier = self._storage if operation.kind in STORAGE_KINDS else self._host
            if tier is None or operation.kind in TRANSFERS:
                copies.outcomes.append(_impossible(operation))
        self._start(copies, LOOKUPS)
        return copies

    def load(self, copies: StepCopies) -> None:
        """Copies from the host, once zeroing and copying are done and before the batch reads."""
        self._copy(copies, LOADS)

    def end(self, copies: StepCopies) -> None:
        """Returns once every copy is done that was started, and has the storage put: it may be what was just saved."""
        if copies.copied is not None:
            copies.copied.wait()
        self._start(copies, PUTS)

    def _copy(self, copies: StepCopies, kinds: Sequence[OperationKind]) -> None:
        """Those of ``kinds``, SAVES or LOADS."""
        host, arena = self._host, self._arena
        wanted = [] if host is None else [operation for operation in copies.operations if operation.kind in kinds]
        if host is None or not wanted:
            return
        if copies.copied is None:
            copies.copied = self._placement.mark()
        copy = host.save if kinds is SAVES else host.load
        with self._placement.copying():
            copies.outcomes += [
                OperationOutcome(op_id=each.op_id, succeeded=copy(arena, each.group, each.source, each.target))
                for each in wanted
            ]
            copies.copied.set()

    def _start(self, copies: StepCopies, kinds: Sequence[OperationKind]) -> None:
        if self._storage is None:
            return
        for operation in copies.operations:
            if operation.kind in kinds:
                self._storage.start(operation)

    def exchanges(self, copies: StepCopies) -> bool:
        """Whether ``agreed`` asks the other ranks."""
        return self._communication.world > 1 and bool(copies.outcomes)

    def agreed(self, copies: StepCopies) -> tuple[OperationOutcome, ...]:
        """The outcomes once every rank has made its copies: a block is there where all of them have their part of
        it."""
        outcomes = copies.outcomes
        if not self.exchanges(copies):
            return tuple(outcomes)
        sizes = {operation.op_id: _count(operation) for operation in copies.operations}
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
