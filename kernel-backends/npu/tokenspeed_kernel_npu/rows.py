"""Rows of several queries, as the host knows them: which queries see a key, and where each row's keys are."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """The rows that have a query which sees a key.

    Attributes:
        owners: their places in the batch.
        begins: the first such query of each; they are the row's last ones.
        counts: how many they are, at least 1, at most the row's length.
        lengths: positions of each row.
        blind: (start, stop) of queries before their row's first position, whose output is zeros.
    """

    owners: list[int]
    begins: list[int]
    counts: list[int]
    lengths: list[int]
    blind: list[tuple[int, int]]

    @staticmethod
    def of(starts: list[int], seq_lens: list[int]) -> "Rows":
        """``starts`` [B + 1]: row b has the queries starts[b] … starts[b + 1] - 1, at the last of its seq_lens[b]
        positions."""
        rows = Rows([], [], [], [], [])
        for row, length in enumerate(seq_lens):
            start, stop = starts[row : row + 2]
            begin = max(start, stop - length)
            if begin > start:
                rows.blind.append((start, begin))
            if begin < stop:
                rows.owners.append(row)
                rows.begins.append(begin)
                rows.counts.append(stop - begin)
                rows.lengths.append(length)
        return rows

    def clear_blind(self, out: torch.Tensor) -> None:
        """Zeros where a query sees no key."""
        for start, stop in self.blind:
            out[start:stop] = 0.0

    def _side_by_side(self) -> bool:
        ends = [begin + count for begin, count in zip(self.begins, self.counts, strict=True)]
        return self.begins[1:] == ends[:-1]

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """The queries' rows of ``x`` [T, …]; a view where they lie side by side."""
        if self._side_by_side():
            return x[self.begins[0] : self.begins[0] + sum(self.counts)]
        return torch.cat([x[begin : begin + count] for begin, count in zip(self.begins, self.counts, strict=True)])

    def put(self, out: torch.Tensor, found: torch.Tensor) -> None:
        """Writes the queries' rows ``found`` to their places in ``out``."""
        for begin, part in zip(self.begins, torch.split(found, self.counts), strict=True):
            out[begin : begin + part.shape[0]] = part

    def part(self, rows: slice) -> "Rows":
        """Some of these rows."""
        return Rows(self.owners[rows], self.begins[rows], self.counts[rows], self.lengths[rows], [])

    def first_keys(self, window: int) -> list[int]:
        """The first position that a query of each row sees; ``window`` 0: the first of all."""
        if not window:
            return [0] * len(self.lengths)
        return [max(0, length - n + 1 - window) for length, n in zip(self.lengths, self.counts, strict=True)]

    def key_places(self, firsts: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [S] each, row after row: the place of a row among these, and its positions from firsts[b] on."""
        lengths = [length - first for length, first in zip(self.lengths, firsts, strict=True)]
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        places = torch.cat([torch.arange(first, stop) for first, stop in zip(firsts, self.lengths, strict=True)])
        return owner.to(device), places.to(device)
