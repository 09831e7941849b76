"""A grammar, or free text, narrowed by words that may not come and by a budget of reasoning."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import Grammar, TokenMatcher
from tokenspeed.grammar.budget import BudgetMatcher, CompiledBudget
from tokenspeed.grammar.words import CompiledWords, WordsMatcher

NO_WORD_LEFT = "bad_words rule out every token that could come next"


class FreeMatcher:
    """All tokens but the end tokens, for ever."""

    may_end = True
    error = ""

    def __init__(self, free: NDArray[np.int32]) -> None:
        self._free = free

    def fill(self, mask: NDArray[np.int32]) -> None:
        np.copyto(mask, self._free)

    def accept(self, token: int) -> None:
        pass


class NarrowedMatcher:
    """See tokenspeed.device.handle.TokenMatcher. What a budget has written is written even in words that may not come:
    reasoning must end."""

    def __init__(self, base: TokenMatcher, words: WordsMatcher | None, budget: BudgetMatcher | None) -> None:
        self._base = base
        self._words = words
        self._budget = budget
        self._is_forced = False
        self._error = ""

    @property
    def may_end(self) -> bool:
        return self._base.may_end and not self._is_forced

    @property
    def error(self) -> str:
        return self._base.error or self._error

    def fill(self, mask: NDArray[np.int32]) -> None:
        self._base.fill(mask)
        self._is_forced = self._budget is not None and self._budget.force(mask)
        if self._is_forced or self._words is None or not mask.any():
            return
        self._words.narrow(mask)
        self._error = "" if self.may_end or mask.any() else NO_WORD_LEFT

    def accept(self, token: int) -> None:
        self._base.accept(token)
        for part in (self._words, self._budget):
            if part is not None:
                part.accept(token)


@dataclass(frozen=True)
class NarrowedGrammar:
    """See tokenspeed.device.handle.Grammar.

    Attributes:
        base: what the text must look like; None is free text.
        words, budget: what narrows it; at least one of them.
    """

    base: Grammar | None
    words: CompiledWords | None
    budget: CompiledBudget | None

    def matcher(self) -> TokenMatcher:
        """Returns a matcher of its own for one choice. Forward thread only."""
        part = self.words or self.budget
        assert part is not None, "what nothing narrows is its base"
        return NarrowedMatcher(
            FreeMatcher(part.free) if self.base is None else self.base.matcher(),
            None if self.words is None else WordsMatcher(self.words),
            None if self.budget is None else BudgetMatcher(self.budget),
        )
