"""Compiles constraints on threads of its own, so that nobody else waits; keeps what was compiled.

Everything but the threads' own work is called on one thread, the event loop's.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from tokenspeed.device.handle import Grammar
from tokenspeed.messages import Constraint, ConstraintError

logger = logging.getLogger(__name__)

WORKERS = 2
TIME_LIMIT_S = 10.0
"""For one compilation. The compiler's own limits end it far earlier; this is for what they do not see."""
QUEUE_LIMIT_S = 30.0
"""Until a worker is free, and the vocabulary read."""
MAX_WAITING = 256
"""Compilations that may be under way; more are refused until some are done."""
MAX_ABANDONED = 4
"""Threads that may be left behind with a compilation that took too long."""
CACHED_GRAMMARS = 256
CACHED_BYTES = 8 << 20
"""Of the texts of the grammars kept; what is compiled from them is of the same order."""


class Compiled(Grammar, Protocol):
    """A grammar that may be told to begin behind a text."""

    def after(self, text: str, opening: str = "") -> Grammar: ...


class Compiler(Protocol):
    """See CheckedCompiler. ``compile`` may run on several threads at a time."""

    def compile(self, constraint: Constraint) -> Compiled: ...

    def close(self) -> None: ...


Outcome = Compiled | ConstraintError


class _Job:
    """One text to compile, for all requests that ask for it meanwhile. ``lock`` guards what both sides write."""

    def __init__(self, constraint: Constraint, now: float) -> None:
        self.constraint = constraint
        self.queued_at = now
        self.began_at: float | None = None
        self.waiters = 0
        self.outcome: Outcome | None = None
        self.lock = threading.Lock()

    def begin(self, now: float) -> bool:
        """A worker takes it up; returns whether there is anything to do."""
        with self.lock:
            if self.outcome is None:
                self.began_at = now
            return self.outcome is None

    def settle(self, outcome: Outcome) -> bool:
        """Sets the outcome; returns whether it was the first."""
        with self.lock:
            first = self.outcome is None
            if first:
                self.outcome = outcome
            return first

    def withdraw(self) -> bool:
        """Takes it back; returns whether no worker had begun."""
        with self.lock:
            if self.began_at is None and self.outcome is None:
                self.outcome = _WITHDRAWN
            return self.outcome is _WITHDRAWN


_WITHDRAWN = ConstraintError("nobody waits for it any more", "constraint_busy")


class Compilation:
    """What one request waits for."""

    def __init__(self, pool: "GrammarPool", job: _Job, begin_after: str, opening: str) -> None:
        self._pool = pool
        self._job = job
        self._begin_after = begin_after
        self._opening = opening
        job.waiters += 1

    def outcome(self) -> Grammar | ConstraintError | None:
        """Returns the grammar, or why there is none; None while it is being compiled."""
        found = self._pool.look(self._job)
        if found is None or isinstance(found, ConstraintError):
            return found
        return found.after(self._begin_after, self._opening)

    def cancel(self) -> None:
        """The request is gone. What nobody waits for and no worker has begun is never compiled."""
        self._job.waiters -= 1
        if self._job.waiters == 0:
            self._pool.withdraw(self._job)


class GrammarPool:
    """Worker threads, started at the first constraint, and a cache by text.

    Args:
        load: makes the compiler; called on a worker at the first compilation, and again where it failed.
        time_limit_s, queue_limit_s, workers, clock: see the constants; for tests.
    """

    def __init__(
        self,
        load: Callable[[], Compiler],
        *,
        time_limit_s: float = TIME_LIMIT_S,
        queue_limit_s: float = QUEUE_LIMIT_S,
        workers: int = WORKERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._compiler: Compiler | None = None
        self._time_limit_s = time_limit_s
        self._queue_limit_s = queue_limit_s
        self._workers = workers
        self._clock = clock
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._jobs: dict[Constraint, _Job] = {}
        self._cache: OrderedDict[Constraint, _Job] = OrderedDict()
        self._cached_bytes = 0
        self._counting = threading.Lock()
        self._serving = 0  # threads that take jobs
        self._abandoned = 0  # threads inside a job that was given up

    def compile(self, constraint: Constraint) -> Compilation:
        """Begins to compile, or finds it done or under way. Raises ConstraintError where too many are under way."""
        for waiting in list(self._jobs.values()):
            self.look(waiting)  # of those whose requests are gone too, so that none holds a worker for ever
        key = Constraint(kind=constraint.kind, text=constraint.text)
        job = self._cache.get(key)
        if job is not None:
            self._cache.move_to_end(key)
            return Compilation(self, job, constraint.begin_after, constraint.opening)
        job = self._jobs.get(key)
        if job is None:
            if len(self._jobs) >= MAX_WAITING:
                raise ConstraintError(
                    f"{MAX_WAITING} constraints are being compiled already; try again in a moment", "constraint_busy"
                )
            job = self._jobs[key] = _Job(key, self._clock())
            self._start_workers()
            self._queue.put(job)
        return Compilation(self, job, constraint.begin_after, constraint.opening)

    def look(self, job: _Job) -> Outcome | None:
        """The outcome of ``job``; ends one that took too long, and moves one that ended from the jobs to the cache."""
        if job.outcome is None:
            self._expire(job)
        outcome = job.outcome
        if outcome is not None and self._jobs.get(job.constraint) is job:
            del self._jobs[job.constraint]
            self._keep(job.constraint, job, outcome)
        return outcome

    def withdraw(self, job: _Job) -> None:
        """Nobody waits for ``job``: it is dropped unless it is being compiled."""
        if self._jobs.get(job.constraint) is job and job.withdraw():
            del self._jobs[job.constraint]

    def close(self) -> None:
        """Ends the threads that are idle; one inside a compilation ends with the process."""
        with self._counting:
            for _ in range(self._serving):
                self._queue.put(None)
        if self._compiler is not None:
            self._compiler.close()

    def _keep(self, key: Constraint, job: _Job, outcome: Outcome) -> None:
        """Caches refusals too, those for lack of time included: the same mistake is often made again."""
        if isinstance(outcome, ConstraintError) and outcome.code != "invalid_constraint":
            return
        self._cache[key] = job
        self._cached_bytes += len(key.text)
        while len(self._cache) > CACHED_GRAMMARS or (self._cached_bytes > CACHED_BYTES and len(self._cache) > 1):
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest.text)

    def _expire(self, job: _Job) -> None:
        now, began = self._clock(), job.began_at
        if began is None:
            if now - job.queued_at > self._queue_limit_s:
                job.settle(
                    ConstraintError(
                        f"no worker was free for {self._queue_limit_s:g} s to compile the constraint; try again later",
                        "constraint_busy",
                    )
                )
        elif now - began > self._time_limit_s and job.settle(
            ConstraintError(f"the {job.constraint.kind} takes longer than {self._time_limit_s:g} s to compile")
        ):
            logger.warning("a %s of %d characters was given up", job.constraint.kind, len(job.constraint.text))
            with self._counting:
                self._serving -= 1
                self._abandoned += 1
            self._start_workers()

    def _start_workers(self) -> None:
        with self._counting:
            missing = min(
                self._workers - self._serving, MAX_ABANDONED + self._workers - self._serving - self._abandoned
            )
            for _ in range(missing):
                self._serving += 1
                threading.Thread(target=self._work, name="grammar", daemon=True).start()

    # What runs on the workers.

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                compiler = self._loaded()
            except Exception as error:
                logger.exception("constraints cannot be compiled")
                job.settle(ConstraintError(f"structured output is not available: {error}", "constraint_unavailable"))
                continue
            given_up = job.begin(self._clock()) and not job.settle(_compiled(compiler, job.constraint))
            if given_up and not self._may_go_on():
                return

    def _loaded(self) -> Compiler:
        with self._loading:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler

    def _may_go_on(self) -> bool:
        """After a job that was given up: whether there is still a place among the workers."""
        with self._counting:
            self._abandoned -= 1
            if self._serving >= self._workers:
                return False
            self._serving += 1
            return True


def _compiled(compiler: Compiler, constraint: Constraint) -> Outcome:
    try:
        return compiler.compile(constraint)
    except ConstraintError as error:
        return error
    except BaseException as error:  # a panic of the compiler is no Exception
        logger.exception("a %s could not be compiled", constraint.kind)
        return ConstraintError(f"the {constraint.kind} cannot be compiled ({type(error).__name__})")
