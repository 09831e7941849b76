"""Block tables kept by a plan's deltas, as the forward thread keeps them."""

from collections import defaultdict
from collections.abc import Collection, Iterator

from tokenspeed_scheduler import BlockTableDelta


class ReplayedTables:
    """Tables of one group by pool row; a delta that does not fit the version fails at once."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.versions: dict[int, int] = {}
        self.entries = 0

    def begin(self, row: int) -> None:
        """A request begins in ``row``: its table is empty and has version 0."""
        self.tables[row] = []
        self.versions[row] = 0

    def end(self, row: int) -> None:
        """The row's request gave its blocks back."""
        self.tables.pop(row, None)
        self.versions.pop(row, None)

    def apply(self, delta: BlockTableDelta) -> set[int]:
        """Applies one delta and returns the rows it touched."""
        rows = delta.row.tolist()
        ids = delta.ids.tolist()
        assert len(ids) == int(delta.count.sum())
        offset = 0
        entries = zip(
            rows,
            delta.first_slot.tolist(),
            delta.count.tolist(),
            delta.version_from.tolist(),
            delta.version_to.tolist(),
            strict=True,
        )
        for row, first, count, version_from, version_to in entries:
            assert row in self.tables, f"a delta for row {row}, which nobody has"
            assert version_from == self.versions[row], f"row {row} is at version {self.versions[row]}"
            assert version_to == version_from + 1
            table = self.tables[row]
            assert 0 <= first <= len(table), f"a delta of row {row} leaves a hole before slot {first}"
            table[first:] = ids[offset : offset + count]
            assert 0 not in table, f"row {row} of a full-history group has a null block"
            assert len(set(table)) == len(table), f"row {row} has one block twice: {table}"
            self.versions[row] = version_to
            self.entries += 1
            offset += count
        return set(rows)

    def shared(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The blocks that stand in more than one table, each with its (row, slot) pairs."""
        owners: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, table in self.tables.items():
            for slot, block in enumerate(table):
                owners[block].append((row, slot))
        return ((block, places) for block, places in owners.items() if len(places) > 1)

    def held(self, rows: Collection[int] | None = None) -> int:
        """How many distinct blocks stand in the tables (of ``rows``)."""
        tables = self.tables.values() if rows is None else (self.tables[row] for row in rows)
        return len({block for table in tables for block in table})
