"""An engine process that loads its libraries while the command line still finds out what it is to serve.

Half a second of a start: resolving, planning and reading headers need one core, the engine's imports another.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenspeed.engine.process import EngineProcess, EngineStreams, engine_command
from tokenspeed.launch.engine_streams import memory_file
from tokenspeed.launch.environment import default_environment
from tokenspeed.telemetry.log_relay import wide_pipe


@dataclass(frozen=True)
class BegunEngine:
    """The process, and the descriptors on this side of what it writes: its output's pipe, its last stacks."""

    process: EngineProcess
    output: int
    traceback: int


@contextlib.contextmanager
def early_engine(wanted: bool) -> "Iterator[EarlyEngine | None]":
    """One that ends with the block unless somebody took it; none where it is not ``wanted`` or cannot be had."""
    early = None
    if wanted:
        with contextlib.suppress(OSError):  # the real start will say what is wrong
            early = EarlyEngine()
    try:
        yield early
    finally:
        if early is not None:
            early.discard()


class EarlyEngine:
    """Starts the process in the environment that an engine has where no recipe says otherwise.

    Raises OSError where it cannot be started.
    """

    def __init__(self) -> None:
        environment = default_environment()
        traceback = memory_file("engine-traceback")
        output, writing = wide_pipe()
        try:
            process = EngineProcess(engine_command(), environment, EngineStreams(writing, traceback))
        except OSError:
            os.close(output)
            os.close(traceback)
            raise
        finally:
            os.close(writing)
        self._begun: BegunEngine | None = BegunEngine(process, output, traceback)

    def take(self, environment: Mapping[str, str]) -> BegunEngine | None:
        """The process, for whoever takes it, if it lives and ``environment`` is the one that it was started in; else it
        ends, and there is none. Libraries read their environment as they load."""
        begun, self._begun = self._begun, None
        if begun is None or (begun.process.is_alive and begun.process.environment == dict(environment)):
            return begun
        _end(begun)
        return None

    def discard(self) -> None:
        """Ends the process where nobody took it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            _end(begun)


def _end(begun: BegunEngine) -> None:
    begun.process.discard()
    os.close(begun.output)
    os.close(begun.traceback)
