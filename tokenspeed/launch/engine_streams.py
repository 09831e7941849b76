"""What an engine process writes while it lives and when it dies, as the process that started it sees it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from tokenspeed.engine.process import EngineStreams
from tokenspeed.telemetry.log_relay import Relay
from tokenspeed.telemetry.redaction import Redactor

LONGEST_TRACEBACK = 256 << 10


class EngineOutput:
    """Gives each engine process a pipe that is always read, and a place in memory for its last Python stacks.

    The stacks do not go to a file on a disk: a dying process must not wait for one, nor find it full.

    Attributes:
        relay: reads the pipe.
    """

    def __init__(self, redact: Redactor, process: str = "engine") -> None:
        self.relay = Relay(process, "tokenspeed.engine.output", redact)
        self._redact = redact
        self._traceback = -1

    @contextlib.contextmanager
    def open(self) -> Iterator[EngineStreams]:
        """What one engine process inherits; leave the block once it was started."""
        self._forget()
        self._traceback = memory_file("engine-traceback")
        output = self.relay.open()
        try:
            yield EngineStreams(output, self._traceback)
        finally:
            os.close(output)

    def adopt(self, output: int, traceback: int) -> None:
        """Takes over the descriptors of a process that was started before: the pipe's reading end, and its stacks."""
        self._forget()
        self._traceback = traceback
        self.relay.adopt(output)

    def traceback(self) -> str:
        """Returns the stacks the last engine left when a fatal signal ended it; "" for none."""
        if self._traceback < 0:
            return ""
        return self._redact(os.pread(self._traceback, LONGEST_TRACEBACK, 0).decode(errors="replace"))

    def close(self) -> None:
        """Forgets the last engine's stacks. Its pipe is read until it closes, whoever still holds it."""
        self._forget()

    def _forget(self) -> None:
        descriptor, self._traceback = self._traceback, -1
        if descriptor >= 0:
            os.close(descriptor)


def memory_file(name: str) -> int:
    """A descriptor of a file that is nowhere but in memory, where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
