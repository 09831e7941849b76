"""Runs storage operations beside the steps: no forward waits for a disk."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import OperationOutcome

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""So that a lookup, for which a request waits, does not wait for a long put."""


@dataclass(order=True)
class _Work:
    rank: int
    op_id: int
    run: Callable[[], NDArray[np.uint8]] | None = field(compare=False)
    count: int = field(compare=False, default=0)


_LAST = 1 << 30


class StorageThreads:
    """A queue of storage operations by rank, then age, and the threads that work it off.

    An operation that raises fails for all of its blocks; the threads go on.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._queue: PriorityQueue[_Work] = PriorityQueue()
        self._finished: SimpleQueue[OperationOutcome] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"storage {index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, op_id: int, rank: int, count: int, run: Callable[[], NDArray[np.uint8]]) -> None:
        """Queues ``run``, which returns uint8 [count]; a lower ``rank`` goes first. Never waits."""
        self._queue.put(_Work(rank, op_id, run, count))

    def finished(self) -> list[OperationOutcome]:
        """What ended since this was last asked; never waits."""
        outcomes: list[OperationOutcome] = []
        while True:
            try:
                outcomes.append(self._finished.get_nowait())
            except Empty:
                return outcomes

    def shutdown(self) -> None:
        """Works off what was queued, then ends the threads and waits for them. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for index in range(len(self._threads)):
            self._queue.put(_Work(_LAST, index, None))
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while (work := self._queue.get()).run is not None:
            self._finished.put(OperationOutcome(op_id=work.op_id, succeeded=_outcome(work)))
            del work  # It holds a plan: let it go before waiting for the next.


def _outcome(work: _Work) -> NDArray[np.uint8] | None:
    assert work.run is not None
    try:
        succeeded = work.run()
    except Exception:
        logger.exception("storage operation %d failed", work.op_id)
        return np.zeros(work.count, np.uint8)
    return None if succeeded.all() else succeeded
