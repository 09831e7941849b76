"""The device handle of this process: it queues plans on the forward thread and holds nothing else."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tokenspeed.device.forward_thread import ForwardThread
from tokenspeed.device.handle import OperationOutcome, RowStart, StepResult, StorageUsage
from tokenspeed.device.storage.tier import StorageTier

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan

ExecutePlan = Callable[["Plan", Sequence[RowStart], float], StepResult]


class LocalPendingStep:
    """A queued step; see PendingStep."""

    def __init__(self, forward_id: int, future: "Future[StepResult]") -> None:
        self.forward_id = forward_id
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> StepResult:
        return self._future.result()


class LocalDeviceHandle:
    """See DeviceHandle. ``execute_plan`` runs on the forward thread; it holds all that the device side has.

    ``storage`` is None where there is no storage tier.
    """

    def __init__(self, thread: ForwardThread, execute_plan: ExecutePlan, storage: StorageTier | None) -> None:
        self._thread = thread
        self._storage = storage
        self._execute_plan: ExecutePlan | None = execute_plan

    def execute(self, plan: "Plan", starts: Sequence[RowStart]) -> LocalPendingStep:
        """Queues ``plan``; RuntimeError after ``shutdown``."""
        execute_plan = self._execute_plan
        if execute_plan is None:
            raise RuntimeError("the device side was shut down; no more plans can be executed")
        frozen, submitted = tuple(starts), time.perf_counter()
        future = self._thread.submit(lambda: execute_plan(plan, frozen, submitted))
        return LocalPendingStep(plan.forward_id, future)

    def finished_operations(self) -> list[OperationOutcome]:
        return [] if self._storage is None else self._storage.finished()

    def storage_usage(self) -> StorageUsage | None:
        return None if self._storage is None else self._storage.usage()

    def shutdown(self) -> None:
        """Ends the forward thread, then those of the storage, after what was queued; lets go of arena and weights."""
        self._execute_plan = None
        self._thread.shutdown()
        storage, self._storage = self._storage, None
        if storage is not None:
            storage.shutdown()
