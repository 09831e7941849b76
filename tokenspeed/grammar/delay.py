"""A constraint that begins behind a text: the end of the reasoning."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import TokenMatcher


def free_mask(tokens: int, ends: Sequence[int]) -> NDArray[np.int32]:
    """Returns a mask int32 [ceil(tokens / 32)] of all tokens but the ``ends``."""
    allowed = np.ones(-(-tokens // 32) * 32, np.bool_)
    allowed[tokens:] = False
    allowed[[end for end in ends if end < tokens]] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)


class DelayedMatcher:
    """Lets all but the end tokens through until the text holds ``begin_after``; from there on ``matcher`` rules.

    Such markers are tokens of their own in all families. Where one is not, and the token that completes it goes on,
    white space behind it is dropped and the rest must be what the constraint begins with.
    """

    def __init__(
        self,
        matcher: TokenMatcher,
        begin_after: bytes,
        tokens: Sequence[bytes],
        free: NDArray[np.int32],
        tokenize: Callable[[bytes], list[int]],
    ) -> None:
        self._matcher = matcher
        self._begin_after = begin_after
        self._tokens = tokens
        self._free = free
        self._tokenize = tokenize
        self._tail = b""
        self._begun = False

    @property
    def may_end(self) -> bool:
        return self._begun and self._matcher.may_end

    @property
    def error(self) -> str:
        return self._matcher.error if self._begun else ""

    def fill(self, mask: NDArray[np.int32]) -> None:
        if self._begun:
            self._matcher.fill(mask)
        else:
            np.copyto(mask, self._free)

    def accept(self, token: int) -> None:
        if self._begun:
            self._matcher.accept(token)
            return
        self._tail += self._tokens[token]
        at = self._tail.find(self._begin_after)
        if at < 0:
            self._tail = self._tail[max(0, len(self._tail) - len(self._begin_after) + 1) :]
            return
        self._begun = True
        rest = self._tail[at + len(self._begin_after) :].lstrip()
        for piece in self._tokenize(rest) if rest else ():
            self._matcher.accept(piece)
