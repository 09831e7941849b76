"""Reads what a child process writes to standard output and error, and hands it on as records of this process's logging.

The child's pipe is read by a thread that waits for nobody but the child, so a blocked reader of our own output never
stalls it: not its log, not a print of a native library, not the last words of a crash. A child that prints without end
takes no more of this process than a bounded number of lines a second costs; the others are counted.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from datetime import datetime

import msgspec

from tokenspeed.telemetry.log_records import LONGEST_MESSAGE, RECORD, Entry, as_text, visible
from tokenspeed.telemetry.log_sinks import Tail
from tokenspeed.telemetry.logs import DROPS
from tokenspeed.telemetry.redaction import Redactor

PIPE_BYTES = 1 << 20
LONGEST_LINE = 1 << 18

LINES_PER_S = 1000
BURST_LINES = 5000
"""So many lines a second are logged for long, and so many at once after a quiet time."""


def wide_pipe() -> tuple[int, int]:
    """A pipe that holds as much as it may: its reading and its writing end."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # an unprivileged user may have used up all that pipes may hold
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


class Allowance:
    """A number of lines that fills up with time."""

    def __init__(self, per_second: int = LINES_PER_S, burst: int = BURST_LINES) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = float(burst)
        self._at = time.monotonic()

    def take(self) -> bool:
        """Takes one, if there is one."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Relay:
    """The output of one child after another, each through a pipe of its own.

    Args:
        process: the child's name in the log.
        logger: the name under which lines are logged that are no entries.
        redact: blanks secrets in those.
    """

    def __init__(self, process: str, logger: str, redact: Redactor) -> None:
        self._tail = Tail()
        self._allowance = Allowance()
        self._missing = 0
        self._process = process
        self._redact = redact
        self._foreign = logging.getLogger(logger)
        self._decoder = msgspec.json.Decoder(Entry)
        self._ended = threading.Event()

    def open(self) -> int:
        """Returns the writing end of a fresh pipe, for a child that is about to start; the caller closes its copy."""
        reading, writing = wide_pipe()
        self.adopt(reading)
        return writing

    def adopt(self, reading: int) -> None:
        """Reads the pipe of a child that was started before, and closes its descriptor in the end."""
        self._ended = ended = threading.Event()
        threading.Thread(target=self._read, args=(reading, ended), name="log relay", daemon=True).start()

    def last_lines(self) -> str:
        """Returns the last lines as text, those included that were too many to be logged."""
        return "".join(map(self._as_text, self._tail.lines()))

    def end_of_last(self) -> threading.Event:
        """Returns what is set once everything that the last child wrote is read."""
        return self._ended

    def _read(self, descriptor: int, ended: threading.Event) -> None:
        held = b""
        try:
            while data := os.read(descriptor, 1 << 16):
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    self._line(line)
                if len(held) > LONGEST_LINE:
                    self._line(held)
                    held = b""
            if held:
                self._line(held)
            self._say_missing()
        finally:
            os.close(descriptor)
            ended.set()

    def _line(self, line: bytes) -> None:
        self._tail.add(line)
        if not self._allowance.take():
            self._missing += 1
            DROPS.add(self._process, 1)
            return
        self._say_missing()
        printed, mark, record = line.partition(RECORD)
        try:
            if printed.strip():
                self._print(printed)
            if mark:
                self._record(record)
        except Exception:  # whatever a handler does, the child's pipe is to be read
            self._foreign.exception("a line of the process %s could not be logged", self._process)

    def _print(self, line: bytes) -> None:
        self._foreign.info("%s", self._readable(line), extra={"process_name": self._process})

    def _readable(self, line: bytes) -> str:
        return self._redact(visible(line.decode(errors="replace"), LONGEST_MESSAGE))

    def _as_text(self, line: bytes) -> str:
        printed, mark, record = line.partition(RECORD)
        text = f"{self._readable(printed)}\n" if printed.strip() else ""
        if mark:
            try:
                text += as_text(self._decoder.decode(record)).decode()
            except (msgspec.MsgspecError, ValueError):
                text += f"{self._readable(record)}\n"
        return text

    def _say_missing(self) -> None:
        if self._missing:
            self._foreign.warning(
                "%d lines of the process %s are missing here: it wrote more than %d a second",
                self._missing,
                self._process,
                LINES_PER_S,
                extra={"process_name": self._process},
            )
            self._missing = 0

    def _record(self, line: bytes) -> None:
        try:
            entry = self._decoder.decode(line)
            created = datetime.fromisoformat(entry.time).timestamp()
        except (msgspec.MsgspecError, ValueError):
            self._print(line)  # torn by the end of the process
            return
        if entry.dropped:
            DROPS.add(entry.process, entry.dropped)
        level = logging.getLevelNamesMapping().get(entry.level.upper(), logging.INFO)
        logger = logging.getLogger(entry.logger)
        if logger.isEnabledFor(level):
            logger.handle(
                logging.makeLogRecord(
                    {
                        "name": entry.logger,
                        "levelno": level,
                        "levelname": logging.getLevelName(level),
                        "msg": entry.message,
                        "created": created,
                        "exc_text": entry.exception or None,
                        "process_name": entry.process,
                        "request_id": entry.request_id,
                    }
                )
            )
