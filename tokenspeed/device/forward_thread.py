"""The one thread of a rank that touches the device: a FIFO of closures."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from tokenspeed.device.handle import StepFailed

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Item = tuple[Callable[[], object], "Future[object]"]


class DeviceStateLost(RuntimeError):
    """What the device holds can no longer be trusted (a block table of another version): no later step may run."""


class ForwardThread:
    """Runs closures one after another, in the order they were submitted.

    A closure that raises fails its own future, with StepFailed and the cause chained; the thread goes on. After a
    DeviceStateLost every later closure fails with the same cause without being run.
    """

    def __init__(self, name: str = "forward") -> None:
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._lost: DeviceStateLost | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Queues ``work`` and returns its future; never waits. RuntimeError after ``shutdown``."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the forward thread was shut down; no more work can be queued")
            self._queue.put((work, future))  # type: ignore[arg-type]
        return future

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Queues ``work`` and waits for its result; raises StepFailed where it raised."""
        return self.submit(work).result()

    def shutdown(self) -> None:
        """Runs what was queued, then ends the thread and waits for it. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run_one(*item)
            del item  # The closure holds a plan and a step's arrays: let them go before waiting for the next.

    def _run_one(self, work: Callable[[], object], future: "Future[object]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._lost is not None:
                raise self._lost
            result = work()
        except Exception as error:
            if isinstance(error, DeviceStateLost):
                self._lost = error
            logger.error("a step failed on the forward thread: %s", error, exc_info=error)
            failure = StepFailed(f"the step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            future.set_exception(failure)
        else:
            future.set_result(result)
