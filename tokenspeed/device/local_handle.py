"""The device handle of this process: it queues plans on the forward thread and holds nothing else."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenspeed.device.forward_thread import ForwardThread, Launched
from tokenspeed.device.handle import OperationOutcome, RowStart, StepResult, StorageUsage
from tokenspeed.device.storage.tier import StorageTier

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan


class PlanRunner(Protocol):
    """Whatever executes plans; see Runner."""

    def must_follow(self, plan: "Plan", starts: Sequence[RowStart], before: Launched) -> bool: ...

    def launch(self, plan: "Plan", starts: Sequence[RowStart], submitted: float, *, overlapped: bool) -> Launched: ...


@dataclass(slots=True)
class _PlannedStep:
    """See Launchable."""

    runner: PlanRunner
    plan: "Plan"
    starts: Sequence[RowStart]
    submitted: float

    def must_follow(self, before: Launched) -> bool:
        return self.runner.must_follow(self.plan, self.starts, before)

    def launch(self, *, overlapped: bool) -> Launched:
        return self.runner.launch(self.plan, self.starts, self.submitted, overlapped=overlapped)


class LocalPendingStep:
    """A queued step; see PendingStep."""

    def __init__(self, forward_id: int, thread: ForwardThread, future: "Future[StepResult]") -> None:
        self.forward_id = forward_id
        self._thread = thread
        self._future = future
        self._is_asked = False

    def done(self) -> bool:
        self._ask()
        return self._future.done()

    def result(self) -> StepResult:
        self._ask()
        return self._future.result()

    def _ask(self) -> None:
        if not (self._is_asked or self._future.done()):
            self._is_asked = True
            self._thread.ask(self._future)


class LocalDeviceHandle:
    """See DeviceHandle. ``runner`` runs on the forward thread; it holds all that the device side has.

    ``storage`` is None where there is no storage tier.
    """

    def __init__(self, thread: ForwardThread, runner: PlanRunner, storage: StorageTier | None) -> None:
        self._thread = thread
        self._storage = storage
        self._runner: PlanRunner | None = runner

    def execute(self, plan: "Plan", starts: Sequence[RowStart]) -> LocalPendingStep:
        """Queues ``plan``; RuntimeError after ``shutdown``."""
        runner = self._runner
        if runner is None:
            raise RuntimeError("the device side was shut down; no more plans can be executed")
        future = self._thread.launch(_PlannedStep(runner, plan, tuple(starts), time.perf_counter()))
        return LocalPendingStep(plan.forward_id, self._thread, future)

    def finished_operations(self) -> list[OperationOutcome]:
        return [] if self._storage is None else self._storage.finished()

    def storage_usage(self) -> StorageUsage | None:
        return None if self._storage is None else self._storage.usage()

    def shutdown(self) -> None:
        """Ends the forward thread, then those of the storage, after what was queued; lets go of arena and weights."""
        self._runner = None
        self._thread.shutdown()
        storage, self._storage = self._storage, None
        if storage is not None:
            storage.shutdown()
