"""The header of a GGUF file: metadata and where each tensor lies. No torch, and no tensor is read.

The ``gguf`` package's reader is not used, because it builds several numpy objects for every token and every merge of
the tokenizer: 2.2 s for a small model whose header this file walks in 0.1 s, and three places (configuration,
tokenizer, weights) read it at a start. A test holds the two readers equal.
"""

import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from tokenspeed.recipes.gguf_formats import TENSOR_FORMATS

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_SUPPORTED_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32


class GgufError(ValueError):
    """A file that is not a usable GGUF file; the message names the file, the place and what would mend it."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        name: as the file has it.
        shape: rows first (the file's own order reversed): a matrix is (outputs, inputs), a vector (length,).
        type_name: the format's name, "F32", "Q4_1" ...
        offset: first byte, from the start of the file.
        nbytes: its size.
        path: the file; of a split model, the part.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Everything but the weights. ``metadata`` keeps the file's keys and values."""

    path: str
    metadata: dict[str, MetadataValue]
    tensors: dict[str, GgufTensor]


_HELD: WeakValueDictionary[tuple[str, int, int], GgufHeader] = WeakValueDictionary()


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Reads the header of the GGUF file at ``path``; raises GgufError where it is missing, damaged or cut short.

    Of a model that is split over several files ``path`` is the first, and the header has the tensors of all. While
    somebody holds the header of a file that did not change, it is the same one again.
    """
    header = _read_one(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return header
    return _whole(header, count)


def _whole(first: GgufHeader, count: int) -> GgufHeader:
    """The header of a model in ``count`` files, of which ``first`` is the first."""
    path = Path(first.path)
    named = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if named is None or int(named[3]) != count:
        raise GgufError(
            f"{path}: is one of {count} files of a split model, which should be called NAME-00001-of-{count:05}.gguf "
            "and so on; give them their names back"
        )
    if first.metadata.get("split.no", 0) != 0:
        raise GgufError(f"{path}: is not the first part of its model; give {named[1]}-00001-of-{count:05}.gguf")
    tensors = dict(first.tensors)
    for number in range(1, count):
        part = _read_one(path.with_name(f"{named[1]}-{number + 1:05}-of-{count:05}.gguf"))
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice or part.metadata.get("split.no") != number:
            what = f"has {twice[0]} again" if twice else f"is part {part.metadata.get('split.no')}, not {number}"
            raise GgufError(f"{part.path}: {what}; the parts are of different models: download them again")
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise GgufError(
            f"{path}: the model has {expected} tensors, its {count} files hold {len(tensors)}: download them again"
        )
    return GgufHeader(path=first.path, metadata=first.metadata, tensors=tensors)


def _read_one(path: str | Path) -> GgufHeader:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            status = os.fstat(file.fileno())
            key = (str(path), status.st_ino, status.st_mtime_ns)
            header = _HELD.get(key)
            if header is None:
                _HELD[key] = header = _Walker(str(path), data).header()
            return header
    except FileNotFoundError:
        raise GgufError(f"{path}: there is no such file; give the path of a .gguf file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, GgufError):
            raise
        raise GgufError(f"{path}: cannot be read as GGUF ({error}); download it again") from error


class _Walker:
    """One pass over the header's bytes."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise GgufError(f"{self._path}: does not begin with GGUF; it is another kind of file or a damaged download")
        self._at = 4
        try:
            return self._body()
        except (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise GgufError(
                f"{self._path}: the header ends or breaks at byte {self._at} of {len(self._data)} ({error}); "
                "the file is cut short or damaged: download it again"
            ) from error

    def _body(self) -> GgufHeader:
        version = self._scalar("I")
        if version not in _SUPPORTED_VERSIONS:
            raise GgufError(
                f"{self._path}: GGUF version {version} (or the other byte order); versions 2 and 3 in little-endian "
                "order are read: convert the file again with a current converter"
            )
        tensor_count, entry_count = int(self._scalar("Q")), int(self._scalar("Q"))
        metadata: dict[str, MetadataValue] = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(int(self._scalar("I")))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(
                f"{self._path}: general.alignment is {alignment!r}; it should be a positive number of bytes"
            )
        places = [self._tensor_entry() for _ in range(tensor_count)]
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in places}
        return GgufHeader(path=self._path, metadata=metadata, tensors=tensors)

    def _scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from("<" + code, self._data, self._at)[0]
        self._at += struct.calcsize("<" + code)
        return value

    def _take(self, length: int) -> bytes:
        piece = self._data[self._at : self._at + length]
        if len(piece) != length:
            raise IndexError(f"{length} bytes were announced, {len(piece)} are left")
        self._at += length
        return piece

    def _string(self) -> str:
        return self._take(int(self._scalar("Q"))).decode("utf-8")

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(int(self._scalar("I")), int(self._scalar("Q")))
        if kind not in _SCALARS:
            raise GgufError(f"{self._path}: metadata of unknown type {kind} at byte {self._at}")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> MetadataValue:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise GgufError(f"{self._path}: a metadata array of type {kind} at byte {self._at} is not supported")
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self._take(struct.calcsize(code))))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = int(self._scalar("I"))
        shape = tuple(int(self._scalar("Q")) for _ in range(dimensions))
        return name, shape[::-1], int(self._scalar("I")), int(self._scalar("Q"))

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TENSOR_FORMATS:
            raise GgufError(f"{self._path}: tensor {name} has the unknown format {kind}")
        type_name, block_elements, block_bytes = TENSOR_FORMATS[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        nbytes = elements // block_elements * block_bytes
        if offset + nbytes > len(self._data):
            raise GgufError(
                f"{self._path}: tensor {name} should end at byte {offset + nbytes}, the file has {len(self._data)}: "
                "it is cut short, download it again"
            )
        return GgufTensor(path=self._path, name=name, shape=shape, type_name=type_name, offset=offset, nbytes=nbytes)
