"""Reads SentencePiece model files (tokenizer.model): what of their protocol buffer a tokenizer is made of.

Field numbers are those of sentencepiece_model.proto, which has not changed them since 2018.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from tokenspeed.frontend.tokenizer import TokenizerError

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
Value = int | bytes


class PieceKind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One token; of two that could be taken, the one with the higher score is."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """One file.

    Attributes:
        pieces: by id.
        kind: "unigram" or "bpe".
        unknown, begin, end: ids; -1 where the model has none.
        characters: the compiled map of the normalisation, b"" for none.
        dummy_prefix: whether a text gets a space in front.
        trims: whether spaces at both ends go and several become one.
    """

    pieces: list[Piece] = field(repr=False)
    kind: str
    unknown: int
    begin: int
    end: int
    characters: bytes = field(repr=False)
    dummy_prefix: bool
    trims: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads a file; TokenizerError where it is damaged, or of a kind that is not unigram or bpe."""
    try:
        content = path.read_bytes()
        parts = list(_fields(content))
        pieces = [_piece(value) for number, value in parts if number == 1 and isinstance(value, bytes)]
        trainer, normalizer = _last(parts, 2), _last(parts, 3)
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path}: no SentencePiece model ({error})") from error
    kind = {1: "unigram", 2: "bpe"}.get(_number(trainer, 3, 1))
    if kind is None or not pieces:
        raise TokenizerError(
            f"{path}: a SentencePiece model of words or characters, or an empty one; unigram and bpe are read"
        )
    return SentencePieceModel(
        pieces=pieces,
        kind=kind,
        unknown=_number(trainer, 40, 0),
        begin=_number(trainer, 41, 1),
        end=_number(trainer, 42, 2),
        characters=bytes(value) if isinstance(value := normalizer.get(2, b""), bytes) else b"",
        dummy_prefix=bool(_number(normalizer, 3, 1)),
        trims=bool(_number(normalizer, 4, 1)),
    )


def _piece(content: bytes) -> Piece:
    text, score, kind = "", 0.0, PieceKind.NORMAL
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = PieceKind(value)
    return Piece(text, score, kind)


def _last(parts: list[tuple[int, Value]], wanted: int) -> dict[int, Value]:
    """The fields of the message ``wanted``; of a field that is there twice, the last counts."""
    found: dict[int, Value] = {}
    for number, value in parts:
        if number == wanted and isinstance(value, bytes):
            found.update(_fields(value))
    return found


def _number(message: dict[int, Value], number: int, default: int) -> int:
    value = message.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is no number")
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(content: bytes) -> Iterator[tuple[int, Value]]:
    """Field numbers and values of one message: numbers, or the bytes of everything else."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(content, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"byte {at}: wire type {kind}")
        if at + size > len(content):
            raise ValueError(f"byte {at}: the file ends within a field")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"byte {at}: a number of more than ten bytes")
