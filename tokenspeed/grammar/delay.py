"""A constraint that begins behind a text: the end of the reasoning, where there is any."""

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


class UndecidedMatcher:
    """Constrained from the beginning by ``early``, unless the text begins with ``opening``: then ``delayed`` rules.

    Both run side by side until the text shows which it is.
    """

    def __init__(
        self,
        early: TokenMatcher,
        delayed: DelayedMatcher,
        opening: bytes,
        tokens: Sequence[bytes],
        beginnings: dict[bytes, list[int]],
    ) -> None:
        """``beginnings`` remembers the tokens that begin a text, which are looked for among all of them."""
        self._early = early
        self._delayed = delayed
        self._left = opening  # what of the opening did not come yet
        self._tokens = tokens
        self._beginnings = beginnings
        self._is_early = True  # ``early`` allowed all tokens so far
        self._ruling: TokenMatcher | None = None

    @property
    def may_end(self) -> bool:
        return self._is_early and self._early.may_end if self._ruling is None else self._ruling.may_end

    @property
    def error(self) -> str:
        return "" if self._ruling is None else self._ruling.error

    def fill(self, mask: NDArray[np.int32]) -> None:
        if self._ruling is not None:
            self._ruling.fill(mask)
            return
        mask[:] = 0
        if self._is_early:
            self._early.fill(mask)
        bits = mask.view(np.uint32)
        for token in self._next_of_opening():
            bits[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        if self._ruling is not None:
            self._ruling.accept(token)
            return
        text = self._tokens[token]
        opens = bool(text) and self._left.startswith(text)
        if self._is_early:
            if opens:
                mask = np.zeros(-(-len(self._tokens) // 32), np.int32)
                self._early.fill(mask)
                self._is_early = bool(mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1))
            if self._is_early:
                self._early.accept(token)
        if not opens:
            self._ruling = self._early
            return
        self._delayed.accept(token)
        self._left = self._left[len(text) :]
        if not self._left:
            self._ruling = self._delayed

    def _next_of_opening(self) -> list[int]:
        """The tokens that are a beginning of what is left of the opening."""
        found = self._beginnings.get(self._left)
        if found is None:
            found = [token for token, text in enumerate(self._tokens) if text and self._left.startswith(text)]
            self._beginnings[self._left] = found
        return found
