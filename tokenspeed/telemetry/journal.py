"""The journal: every input of a scheduler and the digest of every plan, in a file that another machine can replay.

A file is a magic number, a format version and frames: length and CRC-32 of the record (both uint32, little-endian),
then the record as msgpack. What the scheduler is told is in the file before it is told, so a journal holds the input
that a crash came from. A crash may tear the last frame; the reader stops before it and says so. Anything else that is
wrong is refused by name and offset.

A journal holds the token ids of every prompt and output: whoever reads it reads the conversations. It is created
readable by its owner only.
"""

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

logger = logging.getLogger(__name__)

MAGIC = b"TSJOURNL"
FORMAT_VERSION = 1
_PREAMBLE = struct.Struct("<8sI")
_FRAME = struct.Struct("<II")
MAX_FRAME_BYTES = 1 << 30
MAX_JOURNALS = 1000
"""So many files of one name are kept side by side: a restarted engine never writes over the one that tells why."""


class JournalError(ValueError):
    """A file that is no journal, is damaged, or cannot be made; the message names the file and where in it."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first record: what the scheduler was built from.

    Attributes:
        implementation: "native" or "reference".
        config: the arguments of SchedulerConfig; ``groups`` are dictionaries with the arguments of CacheGroup.
        made_with: distribution to version.
    """

    implementation: str
    config: dict[str, Any]
    made_with: dict[str, str]


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A submit and its arguments; ``prompt`` is int32, little-endian."""

    handle: int
    prompt: bytes
    max_new_tokens: int
    declared: bool
    priority: int
    namespace: bytes
    max_cached_prefix_tokens: int


class Advanced(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A batch of events, each [name, arguments in the order of its constructor]; arrays are bytes (int32 or uint8)."""

    events: list[tuple[str, list[int | bytes | None]]]


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A plan: its digest, and of its rows what a person wants to see where another plan comes out.

    ``rows`` is int32 [4, num_rows], little-endian: handle, kind, prefix_len, input_len.
    """

    digest: bytes
    forward_id: int
    rows: bytes


class Raised(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A call raised: ``call`` is "submit" or "advance" (the record before this one), or "plan" (which has no other)."""

    call: str
    error: str
    text: str


Record = Begin | Submitted | Advanced | Planned | Raised

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class JournalWriter:
    """Appends records to a new file; one thread uses it.

    ``append`` collects, ``flush`` hands all that was collected to the operating system in one write, from where it
    survives the end of this process. With ``buffer_bytes`` a flush waits until so much is there: cheaper, and a crash
    loses up to that much. Where a write fails (a full disk) the journal ends, the log says so, and the engine goes on.

    Args:
        path: the file; where it exists, the first of path.1, path.2 ... that does not. The attribute says which.

    Raises JournalError where the file cannot be created.
    """

    def __init__(self, path: Path, begin: Begin, *, buffer_bytes: int = 0) -> None:
        self.path, self._descriptor = _create(path)
        self._buffer_bytes = buffer_bytes
        self._collected = bytearray(_PREAMBLE.pack(MAGIC, FORMAT_VERSION))
        self.append(begin)
        self._write()

    @property
    def is_open(self) -> bool:
        """Whether records still go to the file."""
        return self._descriptor >= 0

    def append(self, record: Record) -> None:
        """Adds a record to what the next flush writes."""
        if self._descriptor >= 0:
            data = _encoder.encode(record)
            self._collected += _FRAME.pack(len(data), zlib.crc32(data))
            self._collected += data

    def flush(self) -> None:
        """Writes what was collected, where that is as much as the buffer holds."""
        if len(self._collected) > self._buffer_bytes:
            self._write()

    def close(self) -> None:
        """Writes the rest and closes the file; may be called twice."""
        self._write()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        if self._descriptor < 0:
            return
        rest = memoryview(self._collected)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            logger.error("the journal %s ends here: %s", self.path, error.strerror or error)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
        self._collected = bytearray()


def _create(path: Path) -> tuple[Path, int]:
    for number in range(MAX_JOURNALS):
        candidate = path.with_name(f"{path.name}.{number}") if number else path
        try:
            return candidate, os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise JournalError(f"{candidate}: the journal cannot be made: {error.strerror or error}") from None
    raise JournalError(f"{path}: there are {MAX_JOURNALS} journals of that name; remove some or name another file")


class JournalReader:
    """Reads a journal record by record.

    Attributes:
        begin: the first record.
        torn: bytes at the file's end that were left out because a crash tore them; known once all was read.
        is_at_end: whether all was read.
    """

    def __init__(self, path: Path) -> None:
        """Opens and checks the head; raises JournalError where ``path`` is no journal that can be read here."""
        self.path = path
        self.torn = 0
        self.is_at_end = False
        try:
            self._data = path.read_bytes()
        except OSError as error:
            raise JournalError(f"{path}: cannot be read: {error.strerror or error}") from None
        if len(self._data) < _PREAMBLE.size or not self._data.startswith(MAGIC):
            raise JournalError(f"{path}: is no journal (it does not begin with {MAGIC.decode()})")
        _, version = _PREAMBLE.unpack_from(self._data)
        if version != FORMAT_VERSION:
            raise JournalError(f"{path}: has journal format {version}, this version reads format {FORMAT_VERSION}")
        self._frames = self._read_frames()
        first = next(self._frames, None)
        if not isinstance(first, Begin):
            raise JournalError(f"{path}: does not say what its scheduler was built from (its first record is missing)")
        self.begin = first

    def __iter__(self) -> Iterator[Record]:
        """Yields the records behind the first, once; raises JournalError for a damaged one."""
        return self._frames

    def _read_frames(self) -> Iterator[Record]:
        offset, end = _PREAMBLE.size, len(self._data)
        while offset < end:
            frame = self._frame(offset)
            if frame is None:
                self.torn = end - offset
                break
            yield self._decode(frame, offset)
            offset += _FRAME.size + len(frame)
        self.is_at_end = True

    def _frame(self, offset: int) -> bytes | None:
        """The bytes of the record at ``offset``; None where the file ends within it or torn bytes follow."""
        start = offset + _FRAME.size
        if start > len(self._data):
            return None
        length, checksum = _FRAME.unpack_from(self._data, offset)
        if 0 < length <= MAX_FRAME_BYTES and start + length > len(self._data):
            return None
        data = self._data[start : start + length]
        if 0 < length <= MAX_FRAME_BYTES and zlib.crc32(data) == checksum:
            return data
        if not any(self._data[offset:]):  # a crash of the machine may leave zeros where data was to come
            return None
        raise JournalError(f"{self.path}: is damaged at byte {offset} (the checksum does not match)")

    def _decode(self, frame: bytes, offset: int) -> Record:
        try:
            return _decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise JournalError(f"{self.path}: holds an unknown record at byte {offset}: {error}") from None


def row_lines(forward_id: int, rows: bytes) -> list[str]:
    """A plan's rows in words; ``rows`` as in Planned."""
    columns = np.frombuffer(rows, dtype="<i4").reshape(4, -1)
    lines = [f"forward {forward_id}, {columns.shape[1]} rows"]
    for handle, kind, prefix, length in columns.T.tolist():
        name = "decode" if kind else "prefill"
        lines.append(f"request {handle}: {name} of {length} at {prefix}")
    return lines
