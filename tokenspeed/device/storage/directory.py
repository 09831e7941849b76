"""A storage tier in a directory of this machine: one file a block, bounded in size, the least recently used go first.

    STORAGE_DIR/<fingerprint>/<first two digits of the digest>/<digest>.<group>.<offset>

A file is written under another name and renamed, so a reader sees all of it or nothing, and it carries the length and a
checksum of its block: what a crash or the disk damaged is removed when it is met. Several engines may share the
directory; blocks of another fingerprint are never looked at, but count for the size, which is that of the directory.
"""

import logging
import os
import re
import threading
import time
import urllib.parse
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import StorageUsage
from tokenspeed.device.storage.backend import BlockKey

logger = logging.getLogger(__name__)

MAGIC = b"TSBLOCK1"
HEADER = Struct("<8sQI")
"""Magic, bytes of the block, CRC-32 of the block."""

KEEP_SHARE = 0.9
"""A directory that grew beyond its limit is cut back to this share of it, so that not every put has to look."""

STALE_S = 3600
"""A half-written file of this age was left by an engine that died."""

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.[^/]*\.\d+|[0-9a-f]{32}\.part")
"""Only what has these names is counted or removed: the directory may hold other people's files."""


class _Entry(NamedTuple):
    used: float
    size: int
    path: str


class DirectoryStorage:
    """See StorageBackend. Safe to use from several threads and several processes.

    Args:
        root: the directory; made where it does not exist.
        fingerprint: see tokenspeed/device/storage/fingerprint.py.
        block_bytes: bytes of one block, by group id.
        limit: bytes of all files under ``root`` together.

    Raises ValueError where the directory cannot be used or the limit is below one block.
    """

    def __init__(self, root: Path, fingerprint: str, block_bytes: Mapping[str, int], limit: int) -> None:
        self._root = root
        self._folder = root / fingerprint
        self._block_bytes = dict(block_bytes)
        self._limit = limit
        self._largest = largest = HEADER.size + max(block_bytes.values())
        if limit < largest:
            raise ValueError(
                f"kv.storage_bytes is {limit}, one block takes {largest} bytes; raise --storage-gb or drop "
                "--storage-dir"
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._drop_stale()
            probe = self._folder / f"{uuid.uuid4().hex}.part"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(f"kv.storage_dir: {root} cannot be written: {error.strerror or error}") from error
        self._lock = threading.Lock()
        self._bytes = self._blocks = 0
        self._cut_back()

    def query(self, keys: Sequence[BlockKey]) -> NDArray[np.uint8]:
        return np.array([self._is_there(key) for key in keys], np.uint8)

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> NDArray[np.uint8]:
        return np.array([self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)], np.uint8)

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> NDArray[np.uint8]:
        return np.array([self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)], np.uint8)

    def usage(self) -> StorageUsage:
        """Of the whole directory, whoever wrote it; what others write or remove is counted when it is cut back."""
        return StorageUsage(blocks=self._blocks, bytes=self._bytes, limit_bytes=self._limit)

    def _path(self, key: BlockKey) -> Path:
        digest = key.digest.hex()
        return self._folder / digest[:2] / f"{digest}.{urllib.parse.quote(key.group_id, safe='')}.{key.offset}"

    def _is_there(self, key: BlockKey) -> bool:
        path = self._path(key)
        try:
            size = path.stat().st_size
        except OSError:
            return False
        if size != HEADER.size + self._block_bytes[key.group_id]:
            self._drop_damaged(path)
            return False
        return True

    def _read(self, key: BlockKey, buffer: memoryview) -> bool:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER.size)
                whole = file.readinto(buffer) == len(buffer) and not file.read(1)
            if not whole or header != HEADER.pack(MAGIC, len(buffer), zlib.crc32(buffer)):
                self._drop_damaged(path)
                return False
            os.utime(path)
        except OSError:
            return False
        return True

    def _write(self, key: BlockKey, buffer: memoryview) -> bool:
        path = self._path(key)
        part = path.with_name(f"{uuid.uuid4().hex}.part")
        try:
            if self._is_there(key):
                os.utime(path)
                return True
            path.parent.mkdir(exist_ok=True, parents=True)
            with part.open("xb") as file:
                file.write(HEADER.pack(MAGIC, len(buffer), zlib.crc32(buffer)))
                file.write(buffer)
            os.replace(part, path)
        except OSError as error:
            logger.warning("a block was not stored under %s: %s", self._root, error)
            _remove(part)
            return False
        with self._lock:
            self._bytes += HEADER.size + len(buffer)
            self._blocks += 1
            if self._bytes > self._limit:
                self._cut_back()
        return True

    def _drop_damaged(self, path: Path) -> None:
        logger.warning("%s is damaged and is removed", path)
        _remove(path)

    def _drop_stale(self) -> None:
        """Removes what engines that died left half written."""
        for entry in self._entries():
            if entry.path.endswith(".part") and entry.used < time.time() - STALE_S:
                _remove(Path(entry.path))

    def _cut_back(self) -> None:
        """Counts what is there, whoever wrote it, and removes the least recently used where that is too much."""
        entries = sorted(self._entries())
        total = sum(entry.size for entry in entries)
        keep = max(int(self._limit * KEEP_SHARE), self._largest) if total > self._limit else total
        removed = 0
        for entry in entries:
            if total <= keep:
                break
            _remove(Path(entry.path))
            total -= entry.size
            removed += 1
        self._bytes, self._blocks = total, len(entries) - removed

    def _entries(self) -> Iterator[_Entry]:
        for folder in _folders(self._root, _FINGERPRINT):
            for shard in (folder, *_folders(folder, _SHARD)):
                for entry in os.scandir(shard):
                    if _BLOCK.fullmatch(entry.name):
                        try:
                            facts = entry.stat()
                        except FileNotFoundError:  # another engine removed it
                            continue
                        yield _Entry(facts.st_mtime, facts.st_size, entry.path)


def _remove(path: Path) -> None:
    with suppress(OSError):  # another engine was faster, or the disk is no longer ours to write
        path.unlink()


def _folders(path: Path, name: "re.Pattern[str]") -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(path) if name.fullmatch(entry.name) and entry.is_dir()]
