"""What a tokenizer has to offer, whatever it was read from, and the error that reading one raises."""

from collections.abc import Sequence
from typing import Protocol


class TokenizerError(ValueError):
    """A tokenizer that cannot be read or is of an unknown kind; the message names the file and what would mend it."""


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        bos_token, eos_token: their text, "" where the model has none; for the chat template.
        bos_token_id: id of the token that begins a sequence, None where the model has none.
        special_ids: tokens that steer and are not text; hidden from clients unless they ask.
        vocab_size: ids below it have a meaning here (the model's own vocabulary may be padded beyond it).
    """

    bos_token: str
    eos_token: str
    bos_token_id: int | None
    special_ids: frozenset[int]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the ids of ``text``.

        Special tokens spelled out in the text become their ids. ``add_special_tokens`` adds what the model wants around
        a plain text (usually a begin token, or nothing); a begin token that the text spells out already is not doubled.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to a text; they may be part of a character. b"" for an unknown id."""
        ...

    def token_name(self, token_id: int) -> str:
        """Returns the token as the vocabulary spells it; "" for an unknown id."""
        ...


def without_doubled_begin(ids: list[int], bos_token_id: int | None) -> list[int]:
    """Returns ``ids`` with one begin token in front where there were two."""
    if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id]:
        return ids[1:]
    return ids


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Returns the text of ``ids``; bytes that make no character become U+FFFD."""
    special = tokenizer.special_ids if skip_special_tokens else frozenset()
    return b"".join(tokenizer.token_bytes(i) for i in ids if i not in special).decode("utf-8", "replace")
