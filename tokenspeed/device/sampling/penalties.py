"""Which tokens a row's prompt and output hold, kept only for the rows whose parameters ask for it."""

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.placement import Placement


class PenaltyState:
    """Counts and prompt masks in compact slots: slot 0 stays empty and serves the rows that have no penalty.

    Memory (5 bytes a token of the vocabulary and slot) grows with the largest number of such rows at one time.

    Attributes:
        counts: int32 [slots, V], how often the output holds a token.
        prompt_mask: bool [slots, V], whether the prompt holds it.
    """

    def __init__(self, placement: Placement, vocab_size: int) -> None:
        self._placement = placement
        self.counts = placement.zeros(1, vocab_size, dtype=torch.int32)
        self.prompt_mask = placement.zeros(1, vocab_size, dtype=torch.bool)
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []

    def begin(self, row: int, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        """Counts what pool row ``row`` holds so far."""
        slot = self._slot_of.get(row)
        if slot is None:
            slot = self._slot_of[row] = self._take()
        upload = self._placement.upload
        self.counts[slot] = 0
        self.prompt_mask[slot] = False
        self.prompt_mask[slot].index_fill_(0, upload(prompt.astype(np.int64)), True)
        ids, times = np.unique(output, return_counts=True)
        self.counts[slot].index_copy_(0, upload(ids.astype(np.int64)), upload(times.astype(np.int32)))

    def release(self, row: int) -> None:
        """Pool row ``row`` needs no counts (any more)."""
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def slot(self, row: int) -> int:
        """The slot of pool row ``row``, 0 where it has none."""
        return self._slot_of.get(row, 0)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor, nan: torch.Tensor) -> None:
        """The rows with these ``slots`` int32 [S] generated ``tokens`` int32 [S], but for those that are ``nan`` bool
        [S]; slot 0 stays empty."""
        counted = (slots > 0).logical_and_(~nan)
        places = slots.long(), tokens.masked_fill(nan, 0).long()
        self.counts.index_put_(places, counted.int(), accumulate=True)

    def _take(self) -> int:
        if not self._free:
            slots, vocab_size = self.counts.shape
            more = max(4, slots)
            zeros = self._placement.zeros
            self.counts = torch.cat([self.counts, zeros(more, vocab_size, dtype=torch.int32)])
            self.prompt_mask = torch.cat([self.prompt_mask, zeros(more, vocab_size, dtype=torch.bool)])
            self._free = list(range(slots + more - 1, slots - 1, -1))
        return self._free.pop()
