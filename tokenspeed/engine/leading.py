"""Rank 0 of several: the loop's own scheduler and handle, with what they are told passed on to the other ranks.

Rank 0 alone hears the frontend, reads the clock, compiles grammars and samples. Whatever comes of that reaches a
scheduler as calls and events, and these are what the others get: so they plan alike, whatever the time is there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from tokenspeed.device.handle import (
    DeviceHandle,
    OperationOutcome,
    PendingStep,
    RowStart,
    StepFailed,
    StepResult,
    StorageUsage,
    peer_is_gone,
)
from tokenspeed.engine.journaled_scheduler import JournaledScheduler, begin_record
from tokenspeed.engine.loop import EngineFailure, PeerLost
from tokenspeed.engine.rank_wire import LeadingLink

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan, Scheduler, SchedulerConfig


def leading_scheduler(
    scheduler: "Scheduler", implementation: str, config: "SchedulerConfig", link: LeadingLink
) -> "Scheduler":
    """``scheduler`` in front of those of the other ranks, which begin with it."""
    link.append(begin_record(implementation, config, {}))
    return cast("Scheduler", JournaledScheduler(scheduler, link))


class LeadingHandle:
    """See DeviceHandle: of the device side here, and of those of all other ranks."""

    def __init__(self, handle: DeviceHandle, link: LeadingLink) -> None:
        self._handle = handle
        self._link = link
        self._stopped = False
        self._ended: dict[int, list[OperationOutcome]] = {}

    def execute(self, plan: "Plan", starts: Sequence[RowStart]) -> "LeadingStep":
        self._link.execute(starts)
        return LeadingStep(self._handle.execute(plan, starts), self._link)

    def finished_operations(self) -> list[OperationOutcome]:
        """Those that ended on every rank; a block is there where all have their part of it."""
        for outcome in (*self._handle.finished_operations(), *self._link.ended()):
            self._ended.setdefault(outcome.op_id, []).append(outcome)
        everywhere = [op_id for op_id, found in self._ended.items() if len(found) == self._link.world]
        return [_least(self._ended.pop(op_id)) for op_id in everywhere]

    def storage_usage(self) -> StorageUsage | None:
        """That of rank 0; the others have as many blocks, each its own part of them."""
        return self._handle.storage_usage()

    def shutdown(self) -> None:
        """Ends the device side here, then the other ranks. May be called twice."""
        self._handle.shutdown()
        if not self._stopped:
            self._stopped = True
            self._link.stop()


class LeadingStep:
    """A step that all ranks make."""

    def __init__(self, step: PendingStep, link: LeadingLink) -> None:
        self._step = step
        self._link = link
        self.forward_id = step.forward_id

    def done(self) -> bool:
        return self._step.done()

    def result(self) -> StepResult:
        """Raises EngineFailure where the forward raised: how far its peers came with theirs is not known here. It is a
        PeerLost where one of them is gone."""
        try:
            return self._step.result()
        except StepFailed as error:
            self._link.is_broken = True
            raise step_failure("rank 0", error) from error


def step_failure(who: str, error: StepFailed) -> EngineFailure:
    """What a failed step of the rank ``who`` means to an engine of several."""
    if peer_is_gone(error):
        return PeerLost(f"{who} lost another rank: {error.__cause__}")
    return EngineFailure(f"a step failed on {who}: {error.__cause__ or error}")


def _least(outcomes: Sequence[OperationOutcome]) -> OperationOutcome:
    failed = [outcome.succeeded for outcome in outcomes if outcome.succeeded is not None]
    if not failed:
        return outcomes[0]
    return OperationOutcome(op_id=outcomes[0].op_id, succeeded=np.minimum.reduce(failed))
