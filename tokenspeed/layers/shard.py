"""Which part of a weight one rank holds."""

from dataclasses import dataclass
from typing import Literal

ShardKind = Literal["replicated", "rows", "columns", "vocabulary"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part of a weight [rows (outputs), columns (inputs)].

    Attributes:
        kind: "replicated" (all of it), "rows" (a range of outputs: column-parallel linear, vocabulary-parallel
            embedding) or "columns" (a range of inputs: the results of the ranks are to be summed). "vocabulary" is
            rows that need not be divisible: the last ranks have fewer.
        rank, world: this rank among how many.
    """

    kind: ShardKind
    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.kind not in ("replicated", "rows", "columns", "vocabulary"):
            raise ValueError(f"shard kind {self.kind!r} is unknown; it is replicated, rows, columns or vocabulary")
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world} does not exist; ranks count from 0")

    def row_range(self, rows: int) -> tuple[int, int]:
        """The rows this rank holds of ``rows``; raises ValueError where they cannot be divided evenly, or where a
        vocabulary has none for it."""
        if self.kind == "vocabulary":
            share = -(-rows // self.world)
            if (self.world - 1) * share >= rows:
                raise ValueError(f"a vocabulary of {rows} is too small for {self.world} ranks; use fewer")
            return self.rank * share, min(rows, (self.rank + 1) * share)
        return self._range(rows, self.kind == "rows")

    def column_range(self, columns: int) -> tuple[int, int]:
        """The columns this rank holds of ``columns``; raises ValueError where they cannot be divided evenly."""
        return self._range(columns, self.kind == "columns")

    def _range(self, extent: int, divided: bool) -> tuple[int, int]:
        if not divided:
            return 0, extent
        if extent % self.world:
            raise ValueError(
                f"{extent} {self.kind} cannot be divided among {self.world} ranks; use a world that divides them"
            )
        share = extent // self.world
        return self.rank * share, (self.rank + 1) * share
