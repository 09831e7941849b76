"""The forward thread: in order, one after another, and never ended by what a closure raises."""

import threading

import pytest

from tokenspeed.device.forward_thread import DeviceStateLost, ForwardThread
from tokenspeed.device.handle import StepFailed


@pytest.fixture
def thread() -> ForwardThread:
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
