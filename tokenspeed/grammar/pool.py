"""Compiles rules on threads of its own, so that nobody else waits; keeps what was compiled.

Everything but the threads' own work is called on one thread, the event loop's.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from tokenspeed.device.handle import Grammar
from tokenspeed.grammar.budget import CompiledBudget
from tokenspeed.grammar.narrowed import NarrowedGrammar
from tokenspeed.grammar.words import CompiledWords
from tokenspeed.messages import BadWords, Constraint, ConstraintError, Rule

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
_WORD_BYTES = 512
"""Of a list of words kept, a character."""


class Compiled(Grammar, Protocol):
    """A grammar that may be told to begin behind a text."""

    def after(self, text: str, opening: str = "") -> Grammar: ...


class Compiler(Protocol):
    """See RuleCompiler. ``compile`` may run on several threads at a time."""

    def compile(self, rule: Rule) -> Compiled | CompiledWords | CompiledBudget: ...

    def close(self) -> None: ...


Outcome = Compiled | CompiledWords | CompiledBudget | ConstraintError


class _Job:
    """One rule to compile, for all requests that ask for it meanwhile. ``lock`` guards what both sides write."""

    def __init__(self, rule: Rule, now: float) -> None:
        self.rule = rule
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
    """What one request waits for: all of its rules."""

    def __init__(self, pool: "GrammarPool", rules: Sequence[Rule], jobs: Sequence[_Job]) -> None:
        self._pool = pool
        self._rules = rules
        self._jobs = jobs
        for job in jobs:
            job.waiters += 1

    def outcome(self) -> Grammar | ConstraintError | None:
        """Returns the grammar, or why there is none; None while it is being compiled."""
        base: Grammar | None = None
        words: CompiledWords | None = None
        budget: CompiledBudget | None = None
        for rule, job in zip(self._rules, self._jobs, strict=True):
            found = self._pool.look(job)
            if found is None or isinstance(found, ConstraintError):
                return found
            if isinstance(found, CompiledWords):
                words = found
            elif isinstance(found, CompiledBudget):
                budget = found
            else:
                assert isinstance(rule, Constraint)
                base = found.after(rule.begin_after, rule.opening)
        return base if words is None and budget is None else NarrowedGrammar(base, words, budget)

    def cancel(self) -> None:
        """The request is gone. What nobody waits for and no worker has begun is never compiled."""
        for job in self._jobs:
            job.waiters -= 1
            if job.waiters == 0:
                self._pool.withdraw(job)


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
        self._jobs: dict[Rule, _Job] = {}
        self._cache: OrderedDict[Rule, _Job] = OrderedDict()
        self._cached_bytes = 0
        self._counting = threading.Lock()
        self._serving = 0  # threads that take jobs
        self._abandoned = 0  # threads inside a job that was given up

    def compile(self, *rules: Rule) -> Compilation:
        """Begins to compile the rules of a request, or finds them done or under way.

        Raises ConstraintError where too many are under way.
        """
        for waiting in list(self._jobs.values()):
            self.look(waiting)  # of those whose requests are gone too, so that none holds a worker for ever
        return Compilation(self, rules, [self._job(_key(rule)) for rule in rules])

    def look(self, job: _Job) -> Outcome | None:
        """The outcome of ``job``; ends one that took too long, and moves one that ended from the jobs to the cache."""
        if job.outcome is None:
            self._expire(job)
        outcome = job.outcome
        if outcome is not None and self._jobs.get(job.rule) is job:
            del self._jobs[job.rule]
            self._keep(job.rule, job, outcome)
        return outcome

    def withdraw(self, job: _Job) -> None:
        """Nobody waits for ``job``: it is dropped unless it is being compiled."""
        if self._jobs.get(job.rule) is job and job.withdraw():
            del self._jobs[job.rule]

    def close(self) -> None:
        """Ends the threads that are idle; one inside a compilation ends with the process."""
        with self._counting:
            for _ in range(self._serving):
                self._queue.put(None)
        if self._compiler is not None:
            self._compiler.close()

    def _job(self, key: Rule) -> _Job:
        job = self._cache.get(key)
        if job is not None:
            self._cache.move_to_end(key)
            return job
        job = self._jobs.get(key)
        if job is None:
            if len(self._jobs) >= MAX_WAITING:
                raise ConstraintError(
                    f"{MAX_WAITING} constraints are being compiled already; try again in a moment", "constraint_busy"
                )
            job = self._jobs[key] = _Job(key, self._clock())
            self._start_workers()
            self._queue.put(job)
        return job

    def _keep(self, key: Rule, job: _Job, outcome: Outcome) -> None:
        """Caches refusals too, those for lack of time included: the same mistake is often made again."""
        if isinstance(outcome, ConstraintError) and outcome.code != "invalid_constraint":
            return
        self._cache[key] = job
        self._cached_bytes += _weight(key)
        while len(self._cache) > CACHED_GRAMMARS or (self._cached_bytes > CACHED_BYTES and len(self._cache) > 1):
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= _weight(oldest)

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
            ConstraintError(f"the {_name(job.rule)} takes longer than {self._time_limit_s:g} s to compile")
        ):
            logger.warning("a %s was given up", _name(job.rule))
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
            given_up = job.begin(self._clock()) and not job.settle(_compiled(compiler, job.rule))
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


def _compiled(compiler: Compiler, rule: Rule) -> Outcome:
    try:
        return compiler.compile(rule)
    except ConstraintError as error:
        return error
    except BaseException as error:  # a panic of the compiler is no Exception
        logger.exception("a %s could not be compiled", _name(rule))
        return ConstraintError(f"the {_name(rule)} cannot be compiled ({type(error).__name__})")


def _key(rule: Rule) -> Rule:
    """What is compiled of a rule; where a constraint begins is said afterwards."""
    return Constraint(kind=rule.kind, text=rule.text) if isinstance(rule, Constraint) else rule


def _name(rule: Rule) -> str:
    if isinstance(rule, Constraint):
        return rule.kind
    return "list of bad words" if isinstance(rule, BadWords) else "budget of reasoning"


def _weight(rule: Rule) -> int:
    """Bytes that count for the cache: of text, or as many as a list of words takes for each of its characters."""
    if isinstance(rule, Constraint):
        return len(rule.text)
    return _WORD_BYTES * sum(map(len, rule.words)) if isinstance(rule, BadWords) else 0
