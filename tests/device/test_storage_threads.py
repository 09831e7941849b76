"""Storage operations run beside everything else: by urgency, none lost, a failing one fails alone."""

import threading

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.storage.threads import StorageThreads


def ones(count: int) -> NDArray[np.uint8]:
    return np.ones(count, np.uint8)


def test_the_urgent_go_first_and_the_older_among_equals() -> None:
    threads = StorageThreads(num_threads=1)
    started, go_on, order = threading.Event(), threading.Event(), []

    def first() -> NDArray[np.uint8]:
        started.set()
        go_on.wait()
        return ones(1)

    threads.submit(1, 2, 1, first)
    started.wait()
    for op_id, rank in ((2, 2), (3, 1), (4, 0), (5, 1)):
        threads.submit(op_id, rank, 1, lambda op_id=op_id: order.append(op_id) or ones(1))
    assert threads.finished() == []
    go_on.set()
    threads.shutdown()
    assert order == [4, 3, 5, 2]
    assert [outcome.op_id for outcome in threads.finished()] == [1, 4, 3, 5, 2]
    assert threads.finished() == []


def test_one_that_raises_fails_for_all_of_its_blocks_and_alone() -> None:
    threads = StorageThreads()

    def broken() -> NDArray[np.uint8]:
        raise OSError("the store is gone")

    threads.submit(1, 0, 3, broken)
    threads.submit(2, 0, 2, lambda: np.array([1, 0], np.uint8))
    threads.submit(3, 0, 2, lambda: ones(2))
    threads.shutdown()
    outcomes = {outcome.op_id: outcome.succeeded for outcome in threads.finished()}
    assert outcomes[1] is not None and outcomes[1].tolist() == [0, 0, 0]
    assert outcomes[2] is not None and outcomes[2].tolist() == [1, 0]
    assert outcomes[3] is None


def test_shutdown_works_off_what_was_queued_and_may_come_twice() -> None:
    threads = StorageThreads(num_threads=3)
    for op_id in range(200):
        threads.submit(op_id, op_id % 3, 1, lambda: ones(1))
    threads.shutdown()
    threads.shutdown()
    assert sorted(outcome.op_id for outcome in threads.finished()) == list(range(200))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("storage")]
