"""The bytes that a token adds to a text, for the two ways in which vocabularies spell them.

*Byte level* (GPT-2 and its descendants): every character of a token stands for one byte. *Word pieces with byte
fallback* (SentencePiece and its descendants): U+2581 stands for a space, ``<0xE2>`` for one byte.
"""

import re
from collections.abc import Callable
from typing import Any

from tokenspeed.frontend.tokenizer import TokenizerError

TokenToBytes = Callable[[str], bytes]

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[int, int]:
    """Returns the byte-level alphabet: code point of the stand-in character to byte.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for U+0100 and what follows.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + at: byte for at, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a byte-level token; a token with other characters is taken as plain text."""
    try:
        return bytes(_ALPHABET[ord(character)] for character in token)
    except KeyError:
        return token.encode()


def word_piece_bytes(token: str) -> bytes:
    """Returns the bytes of a token of a vocabulary with byte fallback."""
    fallback = _FALLBACK.fullmatch(token)
    return bytes((int(fallback[1], 16),)) if fallback else token.replace("\u2581", " ").encode()


def token_to_bytes_for(decoder: dict[str, Any] | None, origin: str) -> TokenToBytes:
    """Returns the function that fits the ``decoder`` part of a tokenizer.json.

    Raises TokenizerError for a decoder whose tokens do not each stand for a fixed string of bytes. A ``Strip`` of the
    text's first space is left out on purpose: what a model generates goes on where the prompt ended.
    """
    steps = _steps(decoder)
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return byte_level_bytes
    replaces_only_spaces = all(
        step.get("pattern") == {"String": "\u2581"} and step.get("content") == " "
        for step in steps
        if step.get("type") == "Replace"
    )
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and replaces_only_spaces:
        return word_piece_bytes
    named = " + ".join(sorted(str(kind) for kind in kinds)) or "none"
    raise TokenizerError(
        f"{origin}: the decoder ({named}) is not supported; ByteLevel, Metaspace, and sequences of Replace, "
        "ByteFallback, Fuse and Strip are"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [inner for step in decoder["decoders"] for inner in _steps(step)]
    return [decoder]
