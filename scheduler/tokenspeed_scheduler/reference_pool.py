"""Blocks and block tables of the plain twin: a list of what is free, a list a request."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenspeed_scheduler import CacheGroup

NULL = 0


@dataclass(frozen=True)
class ReferenceCounts:
    """See GroupCounts."""

    group_id: str
    total: int
    held: int
    free: int
    cached: int = 0
    pinned: int = 0

    @property
    def elsewhere(self) -> int:
        """Blocks whose parents other groups have."""
        return self.total - self.held - self.free


class Pool:
    """Parents, each cut into ``children[group]`` blocks of one group while any of them is taken.

    The ids of parent p in a group of k children are p * k .. p * k + k - 1; parent 0 is null.
    """

    def __init__(self, num_parents: int, children: Sequence[int]) -> None:
        self._children = list(children)
        self._num_parents = num_parents
        self._empty = deque(range(1, num_parents + 1))
        self._open: list[list[int]] = [[] for _ in children]
        self._taken: list[set[int]] = [set() for _ in children]

    def can_take(self, wanted: Sequence[int]) -> bool:
        """Whether so many blocks of each group are there together."""
        parents = 0
        for group, count in enumerate(wanted):
            parents += -(-max(0, count - len(self._open[group])) // self._children[group])
        return parents <= len(self._empty)

    def take(self, group: int) -> int:
        """One block; there must be one."""
        if not self._open[group]:
            first = self._empty.popleft() * self._children[group]
            self._open[group] = list(range(first, first + self._children[group]))
        block = self._open[group].pop(0)
        self._taken[group].add(block)
        return block

    def give(self, group: int, block: int) -> None:
        """Takes a block back; a parent without taken blocks is empty again."""
        self._taken[group].remove(block)
        self._open[group].append(block)
        parent = block // self._children[group]
        of_parent = [b for b in self._open[group] if b // self._children[group] == parent]
        if len(of_parent) == self._children[group]:
            self._open[group] = [b for b in self._open[group] if b not in of_parent]
            self._empty.append(parent)

    def taken(self) -> list[tuple[int, int]]:
        """Every (group, block) that is out."""
        return [(group, block) for group, blocks in enumerate(self._taken) for block in blocks]

    def counts(self, index: int, group: CacheGroup) -> ReferenceCounts:
        """How many blocks the group holds and can still get, beside what other groups hold."""
        free = len(self._open[index]) + len(self._empty) * self._children[index]
        held = len(self._taken[index])
        return ReferenceCounts(group.group_id, total=self._num_parents * self._children[index], held=held, free=free)


@dataclass
class Table(ABC):
    """One group's block table of one request, and what the next delta has to tell."""

    group: CacheGroup
    index: int
    slots: list[int] = field(default_factory=list)
    version: int = 0
    changed_from: int | None = None

    @abstractmethod
    def lacks(self, computed: int, length: int) -> int:
        """Blocks to take before ``length`` tokens at ``computed`` can be computed."""

    @abstractmethod
    def grow(self, computed: int, length: int, pool: Pool) -> None:
        """Takes them."""

    def expire(self, computed: int, pool: Pool) -> None:
        """Gives back what no token from ``computed`` on can see. Forwards that are out run before whoever gets it."""
        for slot in range(min(self._first(computed), len(self.slots))):
            if self.slots[slot] != NULL:
                pool.give(self.index, self.slots[slot])
                self.slots[slot] = NULL
                self._change(slot)

    def held(self) -> list[int]:
        return [block for block in self.slots if block != NULL]

    def release(self, pool: Pool) -> None:
        """Gives every block back."""
        for block in self.held():
            pool.give(self.index, block)
        self.slots = []

    def _first(self, computed: int) -> int:
        """The first slot that a token at ``computed`` sees."""
        window = self.group.sliding_window_tokens if self.group.kind == "sliding_window" else 0
        return max(0, computed - window + 1) // self.group.block_granularity if window else 0

    def _change(self, slot: int) -> None:
        self.changed_from = slot if self.changed_from is None else min(self.changed_from, slot)


class HistoryTable(Table):
    """Every block of a full history; of a sliding window those that a token from ``computed`` on can see."""

    def lacks(self, computed: int, length: int) -> int:
        return self._end(computed, length) - len(self.slots)

    def grow(self, computed: int, length: int, pool: Pool) -> None:
        while len(self.slots) < self._end(computed, length):
            self._change(len(self.slots))
            self.slots.append(pool.take(self.index))

    def _end(self, computed: int, length: int) -> int:
        return -(-(computed + length) // self.group.block_granularity)


class StateTable(Table):
    """One live block for a request's whole life. The input slot stays null: there is no checkpoint to begin from."""

    def lacks(self, computed: int, length: int) -> int:
        del computed, length
        return 0 if self.slots else 1

    def grow(self, computed: int, length: int, pool: Pool) -> None:
        del computed, length
        if not self.slots:
            self.slots = [NULL, pool.take(self.index)]
            self._change(0)


def make_table(group: CacheGroup, index: int) -> Table:
    """An empty table of ``group``, the ``index``-th of the configuration."""
    return StateTable(group, index) if group.kind == "state" else HistoryTable(group, index)
