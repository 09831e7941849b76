"""An engine process as its parent holds it: started now, told later what it is to serve."""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

TRACEBACK_VARIABLE = "TOKENSPEED_TRACEBACK_DESCRIPTOR"

_PIPE_BYTES = 1 << 20
_ASK, _KILL = signal.SIGTERM, signal.SIGKILL


@dataclass(frozen=True)
class EngineStreams:
    """What an engine process inherits: where its output goes, and where a fatal signal leaves its Python stacks.

    Both are descriptors of the parent; the engine finds the second one's number in TRACEBACK_VARIABLE.
    """

    output: int
    traceback: int


def engine_command() -> list[str]:
    """Returns the command line of one engine rank under this interpreter; a crash while it imports says where."""
    return [sys.executable, "-X", "faulthandler", "-m", "tokenspeed.launch.rank"]


class EngineProcess:
    """One child. Its life line is its standard input: it ends when that closes, in whatever way.

    Args:
        environment: added to this process's own.
        streams: what it inherits; without it, this process's own output.

    Attributes:
        name: what messages call it.

    Raises OSError where it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], streams: EngineStreams | None = None
    ) -> None:
        inherited = {TRACEBACK_VARIABLE: str(streams.traceback)} if streams is not None else {}
        output = streams.output if streams is not None else None
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[streams.traceback] if streams is not None else [],
            env={**os.environ, **environment, **inherited},
            # Its own group: a Ctrl-C at the terminal reaches the parent alone, which then drains.
            start_new_session=True,
        )
        self.name = "the engine process"
        self.environment = dict(environment)
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # an unprivileged user may have used up all that pipes may hold
            fcntl.fcntl(self._popen.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._ended: Future[int] = Future()
        threading.Thread(target=self._reap, name="engine process", daemon=True).start()

    def _reap(self) -> None:
        self._ended.set_result(self._popen.wait())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.done()

    def tell(self, line: bytes) -> None:
        """Writes a line to its standard input; one that has ended already is told nothing."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line + b"\n")
            self._popen.stdin.flush()

    def cut(self) -> None:
        """Closes the life line."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()

    async def wait(self) -> int:
        """Returns its exit status once it has ended; negative: the signal that ended it."""
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    def send_signal(self, number: int) -> None:
        """Sends a signal, to nobody if it has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def end(self, patience_s: float) -> None:
        """Cuts the life line, then asks, then kills; returns once the process is gone."""
        self.cut()
        for number in (None, _ASK, _KILL):
            if number is not None:
                self.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), patience_s)
                return

    def discard(self) -> None:
        """Ends one that nobody told anything, and does not wait for it."""
        self.cut()
        self.send_signal(_KILL)
