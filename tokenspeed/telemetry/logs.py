"""One set-up of logging for every process of ours: API, engine ranks, workers.

A record becomes one line at once, in the thread that logs, and goes into the queue of a sink; see log_sinks. What is
printed goes the same way, so that a print cannot wait for a reader either. docs/logs.md explains it to operators.
"""

import contextlib
import faulthandler
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from tokenspeed.telemetry.log_records import (
    LONGEST_EXCEPTION,
    LONGEST_MESSAGE,
    Entry,
    as_json,
    as_text,
    as_wire,
    rfc3339,
    visible,
)
from tokenspeed.telemetry.log_sinks import DescriptorTarget, Drops, RotatedFile, Sink, Tail
from tokenspeed.telemetry.redaction import Redactor

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

FLUSH_S = 2.0
"""How long the end of a process waits for readers of its output."""

OUR_LOGGERS = (
    "tokenspeed",
    "tokenspeed_kernel",
    "tokenspeed_kernel_cpu",
    "tokenspeed_kernel_triton",
    "tokenspeed_kernel_npu",
    "tokenspeed_scheduler",
)
"""They log at the chosen level, all others only warnings: a library's debug lines may hold what a prompt says."""

DROPS = Drops()
"""Records dropped so far by this process and by those whose output it reads."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that the running task works for, "" for none."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What an operator may set; ``file`` "" is standard error, ``files`` counts the current one."""

    level: Level = "info"
    format: Format = "text"
    file: str = ""
    max_bytes: int = 64 << 20
    files: int = 5


class QueueHandler(logging.Handler):
    """Turns records into entries. Takes no lock of its own: the queues have theirs, and hold them for a moment only."""

    def __init__(self, process: str, take: Callable[[Entry], None], redact: Redactor) -> None:
        super().__init__()
        self._process = process
        self._take = take
        self._redact = redact
        self._tracebacks = logging.Formatter()

    def createLock(self) -> None:  # noqa: N802 - the library's name
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(self._entry(record))
        except Exception:
            self.handleError(record)

    def _entry(self, record: logging.LogRecord) -> Entry:
        exception = record.exc_text or ""
        if not exception and record.exc_info and record.exc_info[1] is not None:
            exception = self._tracebacks.formatException(record.exc_info)
        return Entry(
            time=rfc3339(record.created),
            level=record.levelname.lower(),
            process=getattr(record, "process_name", self._process),
            logger=record.name,
            message=self._redact(visible(record.getMessage(), LONGEST_MESSAGE)),
            request_id=visible(getattr(record, "request_id", "") or request_id.get(), 128),
            exception=self._redact(visible(exception, LONGEST_EXCEPTION)),
        )


class LineStream(io.TextIOBase):
    """Stands where sys.stdout or sys.stderr stood: what is printed is handed on line by line, and never waits.

    Args:
        take: gets whole lines, their end included; and, on ``flush``, what has no end yet where ``partial`` is set.
        original: the stream in whose place this one stands, None where there was none.
    """

    def __init__(self, take: Callable[[str], None], original: IO[str] | None, *, partial: bool) -> None:
        self._take = take
        self._original = original
        self._partial = partial
        self._held = ""
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._held = (self._held + text).split("\n")
            if whole:
                self._take("\n".join([*whole, ""]))
            if len(self._held) > LONGEST_MESSAGE:
                self._take(self._held)
                self._held = ""
        return len(text)

    def flush(self) -> None:
        if self._partial:
            with self._lock:
                held, self._held = self._held, ""
                if held:
                    self._take(held)

    def isatty(self) -> bool:
        return self._original is not None and self._original.isatty()

    def fileno(self) -> int:
        if self._original is None:
            raise io.UnsupportedOperation("there is no such stream in this process")
        return self._original.fileno()


class Logs:
    """The logging of one process while it runs. ``tail`` has the last lines, as text."""

    def __init__(self, process: str, redact: Redactor) -> None:
        self.process = process
        self.redact = redact
        self.tail = Tail()
        self._sinks: list[Sink] = []
        self._writers: list[Callable[[Entry], None]] = []

    def sink(self, target: DescriptorTarget | RotatedFile, render: Callable[[Entry], bytes]) -> Sink:
        """Adds a place to write to; its notices of dropped records are rendered like everything else."""

        def notice(count: int) -> bytes:
            return render(
                Entry(
                    time=rfc3339(time.time()),
                    level="warning",
                    process=self.process,
                    logger=__name__,
                    message=f"{count} records are missing here: what reads this log was too slow, or its disk full",
                    dropped=count,
                )
            )

        def trouble(error: OSError) -> None:
            if isinstance(target, RotatedFile):
                self._complain(f"the log file {target.path} cannot be written: {error.strerror}; records are dropped")

        sink = Sink(target, process=self.process, drops=DROPS, notice=notice, on_trouble=trouble)
        self._sinks.append(sink)
        return sink

    def write_to(self, sink: Sink, render: Callable[[Entry], bytes]) -> None:
        """From here on records go to ``sink``."""
        self._writers.append(lambda entry: sink.put(render(entry)))

    def take(self, entry: Entry) -> None:
        """Hands a record to every place, and to the tail where it is this process's own."""
        if entry.process == self.process:
            self.tail.add(as_text(entry))
        for write in self._writers:
            write(entry)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Writes what is queued, for at most so long in all."""
        deadline = time.monotonic() + timeout_s
        for sink in reversed(self._sinks):  # the console's last: a file's trouble is told there
            sink.close(max(0.0, deadline - time.monotonic()))

    def _complain(self, message: str) -> None:
        """Says something of the log itself where the log cannot: on the first sink, which is the console's."""
        entry = Entry(time=rfc3339(time.time()), level="error", process=self.process, logger=__name__, message=message)
        self.tail.add(as_text(entry))
        self._sinks[0].put(as_text(entry))


@contextlib.contextmanager
def server_logs(settings: LogSettings, redact: Redactor, console_file: str = "") -> Iterator[Logs]:
    """The logging of the process that an operator started, until the block ends.

    Args:
        console_file: the file that standard output and error already lead to (a server in the background); it is
            rotated like the log file, which nobody else could do.

    Raises:
        OSError: the log file cannot be opened; the message names it.
    """
    logs = Logs("api", redact)
    render = as_json if settings.format == "json" else as_text
    errors, output = _console(logs, settings, render, Path(console_file) if console_file else None)
    logs.write_to(_file_sink(logs, settings, render) if settings.file else errors, render)
    streams = _stream(logs, settings, output, "stdout"), _stream(logs, settings, errors, "stderr")
    with contextlib.closing(logs), _installed(logs, settings.level, *streams):
        yield logs


def _console(
    logs: Logs, settings: LogSettings, render: Callable[[Entry], bytes], file: Path | None
) -> tuple[Sink, Sink]:
    """The sinks of standard error and standard output; one and the same where both lead to the same place."""
    if file is not None and _leads_to(1, file):
        both = logs.sink(RotatedFile(file, settings.max_bytes, settings.files), render)
        return both, both
    errors = logs.sink(DescriptorTarget(_copy(2)), render)
    if _same_file(1, 2):
        return errors, errors
    return errors, logs.sink(DescriptorTarget(_copy(1)), render)


def _file_sink(logs: Logs, settings: LogSettings, render: Callable[[Entry], bytes]) -> Sink:
    path = Path(settings.file)
    try:
        return logs.sink(RotatedFile(path, settings.max_bytes, settings.files), render)
    except OSError as error:
        raise OSError(
            f"the log file {path} cannot be written: {error.strerror}; choose another with --log-file"
        ) from None


def _stream(logs: Logs, settings: LogSettings, sink: Sink, name: Literal["stdout", "stderr"]) -> LineStream:
    original = getattr(sys, name)
    if settings.format == "text":

        def raw(text: str) -> None:
            data = logs.redact(text).encode("utf-8", "backslashreplace")
            logs.tail.add(data)
            sink.put(data)

        return LineStream(raw, original, partial=True)

    def record(text: str) -> None:
        for line in text.splitlines():
            if line.strip():
                entry = _printed(logs, line, name)
                logs.tail.add(as_text(entry))
                sink.put(as_json(entry))

    return LineStream(record, original, partial=False)


def _printed(logs: Logs, line: str, name: str) -> Entry:
    message = logs.redact(visible(line, LONGEST_MESSAGE))
    return Entry(
        time=rfc3339(time.time()), level="info", process=logs.process, logger=f"tokenspeed.{name}", message=message
    )


@contextlib.contextmanager
def engine_logs(process: str, level: Level, redact: Redactor) -> Iterator[Logs]:
    """The logging of a process whose standard error a Relay reads: everything goes there, as entries."""
    logs = Logs(process, redact)
    sink = logs.sink(DescriptorTarget(_copy(2)), as_wire)
    logs.write_to(sink, as_wire)

    streams = _entries(logs, "stdout"), _entries(logs, "stderr")
    with contextlib.closing(logs), _installed(logs, level, *streams):
        yield logs


def _entries(logs: Logs, name: str) -> LineStream:
    def take(text: str) -> None:
        for line in text.splitlines():
            if line.strip():
                logs.take(_printed(logs, line, name))

    return LineStream(take, getattr(sys, name), partial=False)


@contextlib.contextmanager
def _installed(logs: Logs, level: Level, output: LineStream, errors: LineStream) -> Iterator[None]:
    """Puts handler, streams and hooks in place, and back again."""
    handler = QueueHandler(logs.process, logs.take, logs.redact)
    root = logging.getLogger()
    before = (root.handlers[:], root.level, sys.stdout, sys.stderr, threading.excepthook)
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)
    sys.stdout, sys.stderr = output, errors
    threading.excepthook = _thread_failed
    try:
        yield
    finally:
        for stream in (output, errors):
            stream.flush()
        logging.captureWarnings(False)
        root.handlers[:], sys.stdout, sys.stderr, threading.excepthook = before[0], before[2], before[3], before[4]
        root.setLevel(before[1])
        for name in OUR_LOGGERS:
            logging.getLogger(name).setLevel(logging.NOTSET)


def _thread_failed(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is None or arguments.exc_type is SystemExit:
        return
    known: tuple[type[BaseException], BaseException, TracebackType | None] = (
        arguments.exc_type,
        arguments.exc_value,
        arguments.exc_traceback,
    )
    name = arguments.thread.name if arguments.thread is not None else "gone"
    logging.getLogger("tokenspeed").critical("the thread %s failed", name, exc_info=known)


def _copy(descriptor: int) -> int:
    """A descriptor of our own for the same open file; /dev/null where the process was started without one."""
    try:
        return os.dup(descriptor)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _leads_to(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def traceback_on_fatal_signal() -> None:
    """Has a fatal signal in this process print its Python stacks to standard error, without ever waiting for a reader.

    The descriptor is opened anew where the kernel allows it: O_NONBLOCK would otherwise hold for everybody who shares
    the pipe or the terminal.
    """
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
    with contextlib.suppress(OSError):
        try:
            descriptor = os.open("/proc/self/fd/2", flags)
        except OSError:
            descriptor = os.dup(2)
        faulthandler.enable(descriptor)
