"""The forward thread: in order, one after another, and never ended by what a closure raises; steps in two acts."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from tokenspeed.device.forward_thread import DeviceStateLost, ForwardThread, Launched
from tokenspeed.device.handle import StepFailed, StepResult, StepTimings


@pytest.fixture
def thread() -> Iterator[ForwardThread]:
    made = ForwardThread()
    yield made
    made.shutdown()


def test_closures_run_in_order_on_one_thread(thread: ForwardThread) -> None:
    order: list[tuple[int, int]] = []
    gate = threading.Event()
    thread.submit(gate.wait)
    futures = [thread.submit(lambda i=i: order.append((i, threading.get_ident()))) for i in range(20)]
    assert not any(future.done() for future in futures)
    gate.set()
    for future in futures:
        future.result(timeout=10)
    assert [i for i, _ in order] == list(range(20))
    assert {ident for _, ident in order} == {thread.run(threading.get_ident)}
    assert threading.get_ident() not in {ident for _, ident in order}


def test_an_exception_fails_its_own_step_and_the_thread_goes_on(thread: ForwardThread) -> None:
    def fail() -> None:
        raise ZeroDivisionError("by zero")

    before, failing, after = thread.submit(lambda: 1), thread.submit(fail), thread.submit(lambda: 2)
    assert (before.result(timeout=10), after.result(timeout=10)) == (1, 2)
    with pytest.raises(StepFailed, match="ZeroDivisionError: by zero") as caught:
        failing.result(timeout=10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_nothing_runs_once_the_device_state_is_lost(thread: ForwardThread) -> None:
    ran: list[int] = []

    def lose() -> None:
        raise DeviceStateLost("tables disagree")

    futures = [thread.submit(lose), thread.submit(lambda: ran.append(1))]
    for future in futures:
        with pytest.raises(StepFailed, match="tables disagree"):
            future.result(timeout=10)
    assert not ran


def test_shutdown_runs_what_was_queued_and_then_refuses() -> None:
    thread, gate, ran = ForwardThread(), threading.Event(), []
    thread.submit(gate.wait)
    thread.submit(lambda: ran.append(1))
    closer = threading.Thread(target=thread.shutdown)
    closer.start()
    gate.set()
    closer.join(timeout=10)
    assert not closer.is_alive()
    assert ran == [1]
    thread.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        thread.submit(lambda: None)


def test_a_thread_may_be_shut_down_from_within(thread: ForwardThread) -> None:
    thread.run(thread.shutdown)
    thread.shutdown()


@dataclass
class Steps:
    """Steps on ``thread``, and in ``log`` what became of them: +n when n was launched, -n when it was finished.

    ``raising``: what goes wrong, by the log's number. ``following``: steps that must follow the one before.
    """

    thread: ForwardThread
    may_wait: bool = True
    log: list[int] = field(default_factory=list)
    overlapped: list[int] = field(default_factory=list)
    raising: dict[int, Exception] = field(default_factory=dict)
    following: set[int] = field(default_factory=set)

    def launch(self, number: int) -> "Future[StepResult]":
        return self.thread.launch(Step(self, number))

    def act(self, number: int) -> None:
        self.log.append(number)
        if number in self.raising:
            raise self.raising[number]

    def done(self) -> list[int]:
        """The log once the thread has nothing more to do."""
        settled = threading.Event()
        self.thread._put(settled.set)
        assert settled.wait(timeout=10)
        return self.log


@dataclass
class Step:
    steps: Steps
    number: int
    is_constrained: bool = False

    @property
    def may_wait(self) -> bool:
        return self.steps.may_wait

    def must_follow(self, before: Launched) -> bool:
        assert isinstance(before, Step) and before.number < self.number
        return self.number in self.steps.following

    def launch(self, *, overlapped: bool) -> "Step":
        if overlapped:
            self.steps.overlapped.append(self.number)
        self.steps.act(self.number)
        return self

    def finish(self) -> StepResult:
        self.steps.act(-self.number)
        timings = StepTimings(queued=0.0, prepare=0.0, forward=0.0, sample=0.0)
        nothing = np.zeros(0, np.int32)
        return StepResult(forward_id=self.number, tokens=nothing, nan=nothing.astype(np.bool_), timings=timings)


@pytest.fixture
def steps() -> Iterator[Steps]:
    thread = ForwardThread(overlaps=True)
    yield Steps(thread)
    thread.shutdown()


def test_a_step_is_finished_when_it_is_asked_for_and_what_was_submitted_before_is_launched(steps: Steps) -> None:
    first = steps.launch(1)
    assert steps.done() == [1] and not first.done()
    second = steps.launch(2)
    steps.thread.ask(first)
    assert first.result(timeout=10).forward_id == 1
    assert steps.done() == [1, 2, -1] and not second.done()
    third = steps.launch(3)
    steps.thread.ask(third)  # and whatever is older
    assert (second.result(timeout=10).forward_id, third.result(timeout=10).forward_id) == (2, 3)
    assert (steps.log, steps.overlapped) == ([1, 2, -1, 3, -2, -3], [2, 3])
    steps.thread.ask(first)
    assert steps.done() == [1, 2, -1, 3, -2, -3]


def test_at_most_one_step_is_unfinished_beside_the_one_that_is_launched(steps: Steps) -> None:
    futures = [steps.launch(number) for number in (1, 2, 3, 4)]
    assert steps.done() == [1, 2, -1, 3, -2, 4]
    assert [future.done() for future in futures] == [True, True, False, False]


def test_a_step_that_needs_the_result_of_the_one_before_follows_it(steps: Steps) -> None:
    steps.following = {2}
    for number in (1, 2, 3):
        steps.launch(number)
    assert (steps.done(), steps.overlapped) == ([1, -1, 2, 3], [3])


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_step_that_may_not_wait_is_finished_as_it_is_launched(overlaps: bool) -> None:
    thread = ForwardThread(overlaps=overlaps)
    steps = Steps(thread, may_wait=not overlaps)
    futures = [steps.launch(number) for number in (1, 2)]
    assert [future.result(timeout=10).forward_id for future in futures] == [1, 2]
    assert (steps.log, steps.overlapped) == ([1, -1, 2, -2], [])
    thread.shutdown()


def test_a_closure_runs_behind_finished_steps(steps: Steps) -> None:
    steps.launch(1)
    assert steps.thread.run(lambda: list(steps.log)) == [1, -1]


def test_a_launch_that_raises_fails_its_own_step_only(steps: Steps) -> None:
    steps.raising = {2: ZeroDivisionError("by zero"), -3: MemoryError("no room")}
    futures = [steps.launch(number) for number in (1, 2, 3, 4)]
    for future in futures:
        steps.thread.ask(future)
    steps.done()
    assert [future.exception() is None for future in futures] == [True, False, False, True]
    with pytest.raises(StepFailed, match="ZeroDivisionError: by zero"):
        futures[1].result()
    with pytest.raises(StepFailed, match="MemoryError: no room"):
        futures[2].result()
    assert steps.log == [1, 2, 3, -1, 4, -3, -4]


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_is_lost_in_a_launch_leaves_earlier_steps_their_results(goes_on: bool) -> None:
    thread = ForwardThread(overlaps=True, goes_on=goes_on)
    error = DeviceStateLost("tables disagree") if goes_on else ValueError("tables disagree")
    steps = Steps(thread, raising={2: error})
    futures = [steps.launch(number) for number in (1, 2, 3)]
    thread.shutdown()
    assert futures[0].result().forward_id == 1
    lost = [future.exception().__cause__ for future in futures[1:]]  # type: ignore[union-attr]
    assert lost[0] is lost[1] and isinstance(lost[0], DeviceStateLost) and "tables disagree" in str(lost[0])
    assert error in (lost[0], lost[0].__cause__)
    assert steps.log == [1, 2, -1]


def test_what_is_lost_in_a_finish_ends_the_step_that_was_launched_behind_it(steps: Steps) -> None:
    steps.raising = {-1: DeviceStateLost("gone")}
    futures = [steps.launch(number) for number in (1, 2)]
    steps.thread.shutdown()
    assert [str(future.exception()) for future in futures] == ["the step failed: DeviceStateLost: gone"] * 2
    assert steps.log == [1, 2, -1]


def test_shutdown_finishes_what_was_launched(steps: Steps) -> None:
    futures = [steps.launch(number) for number in (1, 2)]
    steps.thread.shutdown()
    assert [future.result(timeout=0).forward_id for future in futures] == [1, 2]
    with pytest.raises(RuntimeError, match="was shut down"):
        steps.launch(3)
