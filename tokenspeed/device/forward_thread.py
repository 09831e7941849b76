"""The one thread of a rank that touches the device: a FIFO of steps and closures.

A step is executed in two acts. To *launch* it queues all its work on the device; to *finish* it waits for what that
brings to the host and makes the result of it. A step is launched while the one before is unfinished, so that the device
goes from one to the other without a pause. What is launched when hangs on the order of the calls here alone, and never
on how far the device is: all ranks of an engine launch the same steps in the same order.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from tokenspeed.device.handle import StepFailed, StepResult

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class DeviceStateLost(RuntimeError):
    """What the device holds can no longer be trusted (a block table of another version): no later step may run."""


class Launched(Protocol):
    """A step whose work is all queued on the device."""

    @property
    def may_wait(self) -> bool:
        """Whether the next step may be launched before this one is finished, where steps overlap at all."""
        ...

    @property
    def is_constrained(self) -> bool:
        """Whether a row of it draws under a constraint, whose next mask hangs on what the row draws."""
        ...

    def finish(self) -> StepResult:
        """Waits for what the device brings to the host; once, and in the order of launches."""
        ...


class Launchable(Protocol):
    """A step that is to be launched. Both methods run on the forward thread."""

    def must_follow(self, before: Launched) -> bool:
        """Whether ``before`` has to be finished first."""
        ...

    def launch(self, *, overlapped: bool) -> Launched:
        """Queues the step's work on the device; ``overlapped``: behind a step that is unfinished."""
        ...


class ForwardThread:
    """Launches steps and runs closures one after another, in the order they were submitted.

    Where it ``overlaps``, at most one step is unfinished beside the one that is launched. It is finished when its
    result is asked for, or before a later one is launched that must follow it or would be the third. Not as soon as
    nothing else is queued: whoever plans needs the result of step n - 1 to plan n + 1, so at that moment nothing is,
    and to wait for n then would keep n + 1 off the device until it stood still. Elsewhere (on the host's own memory,
    where a launch computes) a step is finished as soon as it is launched.

    What raises fails its own future, with StepFailed and the cause chained; the thread goes on. After a
    DeviceStateLost, or after anything where ``goes_on`` is False, everything later fails with the same cause without
    being run, and everything earlier is finished.
    """

    def __init__(self, name: str = "forward", *, overlaps: bool = False, goes_on: bool = True) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._overlaps = overlaps
        self._goes_on = goes_on
        self._lost: DeviceStateLost | None = None
        self._unfinished: deque[tuple[Launched, Future[StepResult]]] = deque()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def launch(self, step: Launchable) -> "Future[StepResult]":
        """Queues ``step`` and returns the future of its result, which is set once ``ask`` was called or another reason
        came to finish it; never waits. RuntimeError after ``shutdown``."""
        future: Future[StepResult] = Future()
        self._put(partial(self._launch, step, future))
        return future

    def ask(self, future: "Future[StepResult]") -> None:
        """Has the step of ``future`` finished, once all that was submitted so far is launched; never waits."""
        if self._overlaps:
            self._queue.put(partial(self._finish_through, future))

    def submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Queues ``work``, which runs once all steps before it are finished, and returns its future; never waits.
        RuntimeError after ``shutdown``."""
        future: Future[_Result] = Future()
        self._put(partial(self._run, work, future))
        return future

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Queues ``work`` and waits for its result; raises StepFailed where it raised."""
        return self.submit(work).result()

    def shutdown(self) -> None:
        """Runs what was queued and finishes what was launched, then ends the thread and waits for it. May be called
        twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, act: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the forward thread was shut down; no more work can be queued")
            self._queue.put(act)

    # On the thread.

    def _loop(self) -> None:
        while (act := self._queue.get()) is not None:
            act()
            del act  # It holds a plan and a step's arrays: let them go before waiting for the next.
        self._finish_all()

    def _run(self, work: Callable[[], _Result], future: "Future[_Result]") -> None:
        self._finish_all()
        if future.set_running_or_notify_cancel():
            try:
                result = self._sound(work)
            except Exception as error:
                self._fail(error, future)
            else:
                future.set_result(result)

    def _launch(self, step: Launchable, future: "Future[StepResult]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._make_room(step)
            overlapped = bool(self._unfinished)
            launched = self._sound(lambda: step.launch(overlapped=overlapped))
        except Exception as error:
            if self._lost is None and self._ends_all(error):
                self._finish_all()  # they are earlier
            self._fail(error, future)
            return
        if self._overlaps and launched.may_wait:
            self._unfinished.append((launched, future))
        else:
            self._finish_all()
            self._finish(launched, future)

    def _make_room(self, step: Launchable) -> None:
        while self._unfinished and (len(self._unfinished) > 1 or step.must_follow(self._unfinished[0][0])):
            self._finish_oldest()

    def _finish_through(self, future: "Future[StepResult]") -> None:
        while any(each is future for _, each in self._unfinished):
            self._finish_oldest()

    def _finish_all(self) -> None:
        while self._unfinished:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._finish(*self._unfinished.popleft())

    def _finish(self, launched: Launched, future: "Future[StepResult]") -> None:
        try:
            result = self._sound(launched.finish)
        except Exception as error:
            self._fail(error, future)
        else:
            future.set_result(result)

    def _sound(self, act: Callable[[], _Result]) -> _Result:
        """``act`` while the device can be trusted."""
        if self._lost is not None:
            raise self._lost
        return act()

    def _ends_all(self, error: Exception) -> bool:
        return not self._goes_on or isinstance(error, DeviceStateLost)

    def _fail(self, error: Exception, future: "Future[_Result]") -> None:
        if self._lost is None and self._ends_all(error):
            self._lost = error if isinstance(error, DeviceStateLost) else _lost_by(error)
            error = self._lost
        logger.error("a step failed on the forward thread: %s", error, exc_info=error)
        failure = StepFailed(f"the step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        future.set_exception(failure)


def _lost_by(error: Exception) -> DeviceStateLost:
    lost = DeviceStateLost(f"{type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost
