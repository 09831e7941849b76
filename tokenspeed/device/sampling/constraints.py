"""The matchers of the rows whose output is constrained, and the masks they filled. Runs on the forward thread only.

A mask is filled as soon as its row's last token is known, so that a step finds it ready, and a row whose text is whole
is told with the token that made it so.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.handle import Grammar, RowStart, TokenMatcher
from tokenspeed.device.placement import Placement, Twin

logger = logging.getLogger(__name__)

NO_TOKEN = "the constraint leaves no token of this model's vocabulary to go on with"
NO_PROBABILITY = "no token that the constraint allows has a probability above 0 (logit_bias, min_tokens)"


class _Row:
    """One row's matcher, the slot of its mask, and its stop tokens."""

    def __init__(self, matcher: TokenMatcher, slot: int, stops: Sequence[int]) -> None:
        self.matcher: TokenMatcher | None = matcher  # None once it is of no use; what it holds may be megabytes
        self.slot = slot
        self.stops = stops
        self.ended = False  # by a stop token or because nothing may follow; what is drawn later is dropped
        self.refusal = ""


class RowConstraints:
    """Constraints by pool row. Memory (a bit a token of the vocabulary and slot) grows with the most rows at a time."""

    def __init__(self, placement: Placement, vocab_size: int) -> None:
        self._placement = placement
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._make(0)
        self._rows: dict[int, _Row] = {}
        self._free: list[int] = []

    def begin(self, start: RowStart, grammar: Grammar) -> None:
        """A request begins (again) in a pool row: its matcher takes what was generated before."""
        self.release(start.row)
        stops = [token for token in start.sampling.stop_token_ids if 0 <= token < self._vocab_size]
        row = self._rows[start.row] = _Row(grammar.matcher(), self._take(), stops)
        self._advance(row, start.output.tolist())

    def release(self, row: int) -> None:
        """Pool row ``row`` is free (again)."""
        found = self._rows.pop(row, None)
        if found is not None:
            self._free.append(found.slot)

    def places(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """The constrained ones of a batch's pool rows: place in the batch, and pool row."""
        if not self._rows:
            return []
        return [(place, row) for place, row in enumerate(rows) if row in self._rows]

    def fill_slots(self, places: Sequence[tuple[int, int]], slots: NDArray[np.int32]) -> None:
        """Writes ``slots`` int32 [S]: the row of the masks for each place; -1 where there is nothing to mask."""
        slots[:] = -1
        for place, row in places:
            found = self._rows[row]
            if not found.ended and not found.refusal:
                slots[place] = found.slot

    def masks(self) -> torch.Tensor:
        """int32 [slots, ceil(V / 32)] on the device, bit t % 32 of word t // 32 set where token t may be drawn: as they
        are now, brought there with one copy."""
        self._twin.upload(self._host.nbytes)
        return self._masks

    def take(self, row: int, token: int) -> tuple[bool, str]:
        """Pool row ``row`` drew ``token``. Returns whether its text is whole now, and why it drew nothing of use."""
        found = self._rows[row]
        if found.ended or found.refusal:
            return False, found.refusal
        if not self._allows(found.slot, token):
            found.refusal = NO_PROBABILITY
        elif token in found.stops:
            found.ended = True
        else:
            self._advance(found, (token,))
            return found.ended, ""
        found.matcher = None
        return False, found.refusal

    def _allows(self, slot: int, token: int) -> bool:
        return bool(self._host[slot, token // 32] >> (token % 32) & 1)

    def _advance(self, row: _Row, tokens: Iterable[int]) -> None:
        """Accepts tokens and fills the next mask. Whatever a matcher raises is its own request's error."""
        matcher = row.matcher
        assert matcher is not None, "a row that ended takes no tokens"
        try:
            for token in tokens:
                matcher.accept(token)
            self._fill(row, matcher)
        except Exception as error:
            logger.exception("a matcher failed")
            row.refusal = f"the constraint failed: {error}"
        if row.ended or row.refusal:
            row.matcher = None

    def _fill(self, row: _Row, matcher: TokenMatcher) -> None:
        """Fills the mask of what may come next; stop tokens may where the text may end, and nowhere else."""
        self._twin.begin()
        mask = self._host[row.slot]
        matcher.fill(mask)
        may_end, error = matcher.may_end, matcher.error
        bits = mask.view(np.uint32)
        for token in row.stops:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        if error or not mask.any():
            row.ended = may_end and not error
            row.refusal = "" if row.ended else f"the constraint cannot go on: {error}" if error else NO_TOKEN
        elif may_end:
            for token in row.stops:
                bits[token // 32] |= np.uint32(1 << token % 32)

    def _take(self) -> int:
        if not self._free:
            before = self._host
            slots = before.shape[0]
            more = max(4, slots)
            self._make(slots + more)
            self._host[:slots] = before
            self._free = list(range(slots + more - 1, slots - 1, -1))
        return self._free.pop()

    def _make(self, slots: int) -> None:
        """Memory for the masks of so many rows, zeros."""
        self._twin = Twin(self._placement, 4 * slots * self._words)
        self._host: NDArray[np.int32] = self._twin.host.view(np.int32).reshape(slots, self._words)
        self._masks = self._twin.device.view(torch.int32).view(slots, self._words)
