"""A bound on the tokens of reasoning: what ends it is written once they are used up."""

from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import ConstraintError, ThinkingBudget


class CompiledBudget:
    """A budget in the tokens of one vocabulary."""

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, free: NDArray[np.int32]) -> None:
        """``free`` int32 [ceil(V / 32)]: the mask of a text that nothing constrains."""
        self.free = free
        self.tokens = vocabulary.tokens
        self.limit = budget.tokens
        self.opening = budget.opening.encode()
        self.ends = tuple(end.encode() for end in budget.ends)
        self.closing = vocabulary.encode(budget.closing)
        self.is_open = budget.is_open
        self.reopens = budget.reopens
        self.longest = max(len(text) for text in (self.opening, *self.ends))
        if not self.closing:
            raise ConstraintError(f"the tokenizer has no tokens for {budget.closing!r}", "constraint_unavailable")


class _Phase(Enum):
    BEFORE = auto()  # reasoning may open
    INSIDE = auto()
    CLOSING = auto()  # the closing text is being written
    OVER = auto()


class BudgetMatcher:
    """How much of its budget one choice has used. What it says depends on the tokens accepted and on nothing else."""

    def __init__(self, budget: CompiledBudget) -> None:
        self._budget = budget
        self._phase = _Phase.BEFORE
        self._tail = b""
        self._used = 0
        self._written = 0  # tokens of the closing text
        if budget.is_open:
            self._open(b"")

    @property
    def forced(self) -> int | None:
        """The token that must come next; None where it is free."""
        return self._budget.closing[self._written] if self._phase is _Phase.CLOSING else None

    def force(self, mask: NDArray[np.int32]) -> bool:
        """Leaves nothing but the forced token in ``mask``; returns whether there is one and the mask had it.

        Where it had not, a grammar knows better what follows: it goes on, and the closing text ends there.
        """
        token = self.forced
        if token is None or not mask[token // 32] >> token % 32 & 1:
            return False
        mask[:] = 0
        mask.view(np.uint32)[token // 32] = np.uint32(1 << token % 32)
        return True

    def accept(self, token: int) -> None:
        """The choice goes on with ``token``."""
        if self._phase is _Phase.CLOSING:
            if token == self.forced:
                self._written += 1
                if self._written == len(self._budget.closing):
                    self._close(b"")
                return
            self._close(b"")
        if self._phase is _Phase.OVER:
            return
        self._tail += self._budget.tokens[token]
        if self._phase is _Phase.BEFORE:
            self._look_for_opening()
        else:
            self._look_for_end()

    def _look_for_opening(self) -> None:
        opening = self._budget.opening
        if self._budget.reopens:
            at = self._tail.find(opening)
            if at >= 0:
                self._open(self._tail[at + len(opening) :])
            else:
                self._tail = self._tail[-self._budget.longest :]
            return
        text = self._tail.lstrip()
        if text.startswith(opening):
            self._open(text[len(opening) :])
        elif not opening.startswith(text):
            self._phase = _Phase.OVER

    def _look_for_end(self) -> None:
        found = [(at, end) for end in self._budget.ends if (at := self._tail.find(end)) >= 0]
        if found:
            at, end = min(found)
            self._close(self._tail[at + len(end) :])
            return
        self._tail = self._tail[-self._budget.longest :]
        self._use(1)

    def _open(self, rest: bytes) -> None:
        self._phase, self._tail = _Phase.INSIDE, rest
        self._use(0)

    def _use(self, tokens: int) -> None:
        self._used += tokens
        if self._used >= self._budget.limit:
            self._phase, self._written = _Phase.CLOSING, 0

    def _close(self, rest: bytes) -> None:
        self._phase, self._tail = (_Phase.BEFORE, rest) if self._budget.reopens else (_Phase.OVER, b"")
