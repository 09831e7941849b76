"""Where log lines go: a bounded queue and a thread that writes. Whoever puts a line never waits for its reader.

A reader that stands still (a full pipe, a stopped terminal, a full disk) fills the queue; what comes then is dropped
and counted, and the count is said once writing is possible again.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

QUEUE_BYTES = 4 << 20
"""A sink holds at most twice as much: what waits, and what its thread has taken to write."""

CHUNK_BYTES = 1 << 16


class Target(Protocol):
    """What a sink writes to."""

    def write(self, data: bytes) -> None:
        """Writes whole lines; may wait for as long as the reader lets it. Raises OSError."""
        ...

    def close(self) -> None: ...


class Drops:
    """Counts dropped records by process; safe from every thread."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.RLock()

    def add(self, process: str, count: int) -> None:
        with self._lock:
            self._counts[process] = self._counts.get(process, 0) + count

    def counts(self) -> dict[str, int]:
        """Returns the totals so far."""
        with self._lock:
            return dict(self._counts)


class DescriptorTarget:
    """A pipe, a terminal or an open file. Owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._torn = False

    def write(self, data: bytes) -> None:
        view = memoryview(b"\n" + data if self._torn else data)
        while view:
            try:
                written = os.write(self._descriptor, view)
            except BlockingIOError:  # somebody who shares the pipe made it non-blocking; this thread may wait
                _wait_writable(self._descriptor)
                continue
            self._torn = not view[:written].tobytes().endswith(b"\n")
            view = view[written:]
        self._torn = False  # whole: what is left open at its end (a line of progress) is meant

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class RotatedFile:
    """A file of at most ``max_bytes``: then it becomes FILE.1, that one FILE.2 and so on, ``files`` of them in all.

    A file that was removed is made anew; one whose name has gone to another file is written on under its new name and
    no longer rotated. Raises OSError where it cannot be opened at first.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        self._target: DescriptorTarget | None = None
        self._size = 0
        self._inode = (0, 0)
        self._open()

    def write(self, data: bytes) -> None:
        if self._target is None or not self.path.exists():
            self._open()
        if self._size and self._size + len(data) > self._max_bytes and self._is_ours():
            self._rotate()
        assert self._target is not None
        try:
            self._target.write(data)
        finally:
            self._size += len(data)

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None

    def _open(self) -> None:
        self.close()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        found = os.fstat(descriptor)
        self._size, self._inode = found.st_size, (found.st_dev, found.st_ino)
        self._target = DescriptorTarget(descriptor)

    def _is_ours(self) -> bool:
        found = os.stat(self.path)
        return (found.st_dev, found.st_ino) == self._inode

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path.with_name(f"{self.path.name}.{number - 1}") if number > 1 else self.path
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)
        if self._files == 1:
            self.path.unlink(missing_ok=True)
        self._open()


class Sink:
    """One target with its queue and its thread.

    Args:
        target: owned; closed at the end.
        process: under which drops are counted.
        drops: the counter.
        notice: makes the line that says how many records were dropped.
        on_trouble: hears the first error after a success, with the thread of the sink.
    """

    def __init__(
        self,
        target: Target,
        *,
        process: str,
        drops: Drops,
        notice: Callable[[int], bytes],
        on_trouble: Callable[[OSError], None] | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._target = target
        self._process = process
        self._drops = drops
        self._notice = notice
        self._on_trouble = on_trouble
        self._queue_bytes = queue_bytes
        # Re-entrant: the collector may run a finaliser that logs while this very thread holds it.
        self._condition = threading.Condition(threading.RLock())
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._unsaid = 0
        self._writing = False
        self._closing = False
        self._troubled = False
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queues one record, or drops it where the queue is full. Never waits for the reader."""
        with self._condition:
            if self._waiting and self._waiting_bytes + len(line) > self._queue_bytes:
                self._drop(1)
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was put is written, at most so long; returns whether it is."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._waiting or self._writing:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(left)
        return True

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, for at most so long. A reader that stands still is left behind with its thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def _drop(self, count: int) -> None:
        self._unsaid += count
        self._drops.add(self._process, count)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closing:
                    self._condition.wait()
                if not self._waiting:
                    break
                batch, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
                unsaid, self._unsaid = self._unsaid, 0
                self._writing = True
            self._write(batch, unsaid)
            with self._condition:
                self._writing = False
                self._condition.notify_all()
        self._target.close()

    def _write(self, batch: Sequence[bytes], unsaid: int) -> None:
        """Writes a batch and, where records were dropped behind it, says so at the place where they are missing."""
        left = deque(batch)
        try:
            while left:
                count, data = _chunk(left)
                self._target.write(data)
                for _ in range(count):
                    left.popleft()
            if unsaid:
                self._target.write(self._notice(unsaid))
        except OSError as error:
            with self._condition:
                self._unsaid += unsaid
                self._drop(len(left))
            if not self._troubled and self._on_trouble is not None:
                self._on_trouble(error)
            self._troubled = True
        else:
            self._troubled = False


def _chunk(lines: Sequence[bytes]) -> tuple[int, bytes]:
    """The first lines that make up one write: how many, and their bytes."""
    size = 0
    taken: list[bytes] = []
    for line in lines:
        if taken and size + len(line) > CHUNK_BYTES:
            break
        taken.append(line)
        size += len(line)
    return len(taken), b"".join(taken)


def _wait_writable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(1000)


class Tail:
    """The last lines, whatever became of them elsewhere: at most ``max_bytes`` of them. Safe from every thread."""

    def __init__(self, max_bytes: int = 256 << 10) -> None:
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._lock = threading.RLock()

    def add(self, line: bytes) -> None:
        with self._lock:
            self._lines.append(line)
            self._bytes += len(line)
            while self._bytes > self._max_bytes and len(self._lines) > 1:
                self._bytes -= len(self._lines.popleft())

    def lines(self) -> list[bytes]:
        """Returns what was added, as far as it is still there."""
        with self._lock:
            return list(self._lines)

    def text(self) -> str:
        """Returns it as one text."""
        return b"".join(self.lines()).decode(errors="replace")
