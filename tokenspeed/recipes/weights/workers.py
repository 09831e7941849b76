"""Threads that fetch or check files side by side, with one place for progress, waiting and the order to stop."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from tokenspeed.recipes.weights.places import Progress

THREADS = 8
_TICK_S = 0.2
_GRACE_S = 1.0


class Stopped(Exception):
    """Ends a worker after another one failed or the operator interrupted."""


class Watch:
    """What workers share. ``done`` counts bytes; ``note`` is why one waits, "" while none does."""

    def __init__(self, done: int = 0) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.done = done
        self.note = ""

    def add(self, count: int) -> None:
        """Counts bytes; a negative count takes back what must come anew."""
        with self._lock:
            self.done += count

    def check(self) -> None:
        """Raises Stopped once ``stop`` was called."""
        if self._stop.is_set():
            raise Stopped

    def pause(self, seconds: float, why: str) -> None:
        """Waits, and lets the operator know why; raises Stopped."""
        self.note = f"{why}; again in {seconds:.0f} s"
        self._stop.wait(seconds)
        self.note = ""
        self.check()

    def stop(self) -> None:
        """Ends all workers at their next check."""
        self._stop.set()


def run_shown(what: str, jobs: Sequence[Callable[[Watch], None]], watch: Watch, total: int, progress: Progress) -> None:
    """Runs ``jobs``, a few at a time, and shows progress from this thread; raises the first error of a job."""
    if not jobs:
        return

    def tick() -> None:
        progress(f"{what} ({watch.note})" if watch.note else what, watch.done, total)

    tick()
    run_all(jobs, watch, tick)


def run_all(jobs: Sequence[Callable[[Watch], None]], watch: Watch, tick: Callable[[], None]) -> None:
    """Runs ``jobs``, a few at a time, and calls ``tick`` in this thread meanwhile; raises the first error of a job.

    The threads are daemons: after an interruption, one that hangs in the network keeps no process from ending.
    """
    waiting: queue.SimpleQueue[Callable[[Watch], None]] = queue.SimpleQueue()
    finished: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work() -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                job(watch)
            except BaseException as error:
                finished.put(error)
                return
            finished.put(None)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(THREADS, len(jobs)))]
    for worker in workers:
        worker.start()
    try:
        left = len(jobs)
        while left:
            try:
                error = finished.get(timeout=_TICK_S)
            except queue.Empty:
                tick()
                continue
            if error is not None:
                raise error
            left -= 1
            tick()
    finally:
        watch.stop()
        until = time.monotonic() + _GRACE_S
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))
