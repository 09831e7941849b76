"""Starts the engine process, notices when it dies, says so at once, and starts another with back-off.

It lives in the process that serves the API and imports nothing of the engine's weight. The engine's life line is its
standard input: its endpoints and the configuration come as its first line, and when it closes, because this process
ended in whatever way, the engine ends too.
"""

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tokenspeed.engine.process import EngineProcess, EngineStreams
from tokenspeed.engine.rank_processes import RankProcesses
from tokenspeed.messages import EngineStatus

logger = logging.getLogger(__name__)

EXIT_CONFIGURATION = 78
"""The exit status of an engine that cannot start as configured: starting it again would change nothing."""

EXIT_FAILURE = 70
"""The exit status of an engine that failed and said so."""

STOP_GRACE_S = 10.0
LAST_WORDS_S = 1.0


class EngineLink(Protocol):
    """What the supervisor needs of the frontend's end of the wire."""

    def rebind(self) -> tuple[str, str]:
        """Leaves the old endpoints and binds fresh ones for the next engine process: (its input, its output)."""
        ...

    def engine_lost(self, cause: str) -> None:
        """The engine is gone: every open request ends with an error, new ones are refused until the next "ready"."""
        ...

    def engine_given_up(self, cause: str) -> None:
        """Said after ``engine_lost`` when no further engine is started."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineDeath:
    """How one engine process ended unasked. ``status`` is negative for a signal; ``ran_s`` are seconds."""

    cause: str
    status: int
    pid: int
    ran_s: float
    was_ready: bool


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Seconds before restart k are ``first_s * factor**k``, at most ``longest_s``; after ``attempts`` starts in a row
    that never became ready the supervisor gives up."""

    first_s: float = 0.2
    factor: float = 2.0
    longest_s: float = 30.0
    attempts: int = 5

    def delay(self, failures: int) -> float:
        """Returns the wait before the next start after so many failures in a row."""
        return min(self.longest_s, self.first_s * self.factor ** max(failures - 1, 0))


class Supervisor:
    """Keeps one engine process alive.

    Args:
        command: the engine's command line.
        configuration: JSON, written to its standard input beside its endpoints.
        environment: added to this process's own.
        link: the frontend's end of the wire.
        on_give_up: hears the cause when no further engine is started, and whether one was ever ready.
        streams: what each engine process inherits; without it, this process's own output.
        on_death: hears of each engine that ended unasked, before the link does. It must not wait.
        early: the first engine process, where it was started already, with that command, environment and its streams.
        ranks: starts the processes of an engine of several ranks; command, environment and streams are its own then.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        configuration: bytes,
        environment: Mapping[str, str],
        link: EngineLink,
        policy: RestartPolicy | None = None,
        on_give_up: Callable[[str, bool], None] | None = None,
        streams: Callable[[], AbstractContextManager[EngineStreams]] | None = None,
        on_death: Callable[[EngineDeath], None] | None = None,
        early: EngineProcess | None = None,
        ranks: Callable[[], RankProcesses] | None = None,
    ) -> None:
        self._ranks = ranks
        self._command = list(command)
        self._configuration = configuration
        self._environment = dict(environment)
        self._link = link
        self._policy = policy or RestartPolicy()
        self._on_give_up = on_give_up
        self._streams = streams
        self._on_death = on_death
        self._started_at = 0.0
        self._early = early
        self._process: EngineProcess | RankProcesses | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._was_ready = False
        self._ever_ready = False
        self._last_words: asyncio.Future[str] | None = None
        self._first_start = asyncio.Event()
        self.gave_up = ""

    @property
    def pid(self) -> int | None:
        """The engine's process id, while there is one."""
        return self._process.pid if self._process is not None and self._process.is_alive else None

    def status_received(self, status: EngineStatus) -> None:
        """Tells the supervisor what the engine said of itself."""
        if status.phase == "ready":
            self._was_ready = self._ever_ready = True
        if status.phase == "failed" and self._last_words is not None and not self._last_words.done():
            self._last_words.set_result(status.error)

    def start(self) -> None:
        """Starts the first engine and the task that watches it. Call it from a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="engine supervisor")

    async def first_start(self) -> None:
        """Returns once the first engine process was started; raises OSError where it could not be."""
        assert self._task is not None
        started = asyncio.ensure_future(self._first_start.wait())
        await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not self._first_start.is_set():
            self._task.result()

    def retire(self) -> None:
        """From here on the engine may end: no other is started. Should it fail, its open requests still end with an
        error."""
        self._stopping = True

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the engine: its life line is cut, then SIGTERM, then SIGKILL, each after half the grace time. No restart
        follows."""
        self.retire()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None and self._process.is_alive:
            await self._process.end(grace_s / 2)

    async def _watch(self) -> None:
        failures = 0
        while not self._stopping:
            self._was_ready = False
            status = await self._run_once()
            cause = await self._cause(status)
            if self._stopping:
                if status != 0:
                    self._tell_death(cause, status)
                    self._link.engine_lost(cause)
                return
            failures = 1 if self._was_ready else failures + 1
            give_up = status == EXIT_CONFIGURATION or failures >= self._policy.attempts
            logger.error("%s", cause)
            self._tell_death(cause, status)
            self._link.engine_lost(cause)
            if give_up:
                self._give_up(cause)
                return
            delay = self._policy.delay(failures)
            logger.warning("the engine is started again in %.1f s", delay)
            await asyncio.sleep(delay)

    async def _run_once(self) -> int:
        """Runs one engine process to its end and returns its exit status (negative: the signal that ended it)."""
        self._last_words = asyncio.get_running_loop().create_future()
        endpoints = self._link.rebind()
        self._process = process = self._spawn()
        self._first_start.set()
        # One line: whoever reads it has all of it, or nothing.
        process.tell(b'{"endpoints":%s,"configuration":%s}' % (json.dumps(endpoints).encode(), self._configuration))
        try:
            return await process.wait()
        finally:
            process.cut()

    def _spawn(self) -> EngineProcess | RankProcesses:
        self._started_at = time.monotonic()
        if self._ranks is not None:
            return self._ranks()
        early, self._early = self._early, None
        if early is not None:
            return early
        with contextlib.ExitStack() as stack:
            streams = stack.enter_context(self._streams()) if self._streams is not None else None
            return EngineProcess(self._command, self._environment, streams)

    def _tell_death(self, cause: str, status: int) -> None:
        if self._on_death is None or self._process is None:
            return
        ran_s = time.monotonic() - self._started_at
        try:
            self._on_death(
                EngineDeath(cause=cause, status=status, pid=self._process.pid, ran_s=ran_s, was_ready=self._was_ready)
            )
        except Exception:  # whatever becomes of the report, the engine is to come back
            logger.exception("the engine's end could not be reported")

    async def _cause(self, status: int) -> str:
        """Returns why the engine ended. One that ends itself says why before; its words may still be on the way."""
        assert self._last_words is not None
        assert self._process is not None
        if status in (EXIT_CONFIGURATION, EXIT_FAILURE):
            with contextlib.suppress(TimeoutError):
                return f"the engine failed: {await asyncio.wait_for(self._last_words, LAST_WORDS_S)}"
        if status < 0:
            return f"{self._process.name} was ended by {_signal_name(-status)}"
        return f"{self._process.name} ended with status {status}"

    def _give_up(self, cause: str) -> None:
        self.gave_up = cause
        self._link.engine_given_up(cause)
        logger.error("the engine is not started again")
        if self._on_give_up is not None:
            self._on_give_up(cause, self._ever_ready)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
