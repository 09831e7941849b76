"""Token ids to text while they arrive."""

import codecs
from collections.abc import Iterable

from tokenspeed.frontend.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns one choice's tokens into text, piece by piece.

    A character is never split: bytes that do not make a whole one yet are held until the next token completes it or
    shows that it never will (then U+FFFD stands in). The pieces, joined, equal the text of all tokens at once.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """``shown``: special tokens that are text all the same, because somebody reads them."""
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._utf8 = _Utf8("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that became whole with ``token_ids``."""
        hidden, token_bytes = self._hidden, self._token_bytes
        return self._utf8.decode(b"".join([token_bytes(i) for i in token_ids if i not in hidden]))

    def push_one(self, token_id: int) -> str:
        """The same for one token."""
        return "" if token_id in self._hidden else self._utf8.decode(self._token_bytes(token_id))

    @property
    def holds_bytes(self) -> bool:
        """Whether part of a character is waiting for its rest."""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """Returns what was held, as U+FFFD; nothing may be pushed after it."""
        return self._utf8.decode(b"", final=True)
