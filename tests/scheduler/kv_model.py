"""What a device's KV blocks hold, position by position, so that a test can tell whose tokens a block table shows.

Every written cell remembers the chain key of the tokens up to and including its position (equal keys: equal tokens in
the same namespace) and who wrote it. A cached prefix may be handed out only where every cell has the right key, its
forward landed, and no forward of that writer failed at or before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt that shares no first token with one of another salt below 76."""
    return [(7 * position + 13 * salt) % 997 for position in range(length)]


def chain_keys(namespace: bytes, tokens: Sequence[int]) -> list[int]:
    """The key of every position of ``tokens``; a position's key covers all tokens before it and the namespace."""
    keys = []
    key = hash(tuple(namespace))  # of integers: the same in every process
    for token in tokens:
        key = hash((key, token))
        keys.append(key)
    return keys


@dataclass
class PlayedRequest:
    """One request as the engine that plays it sees it.

    Attributes:
        tokens: the prompt and all that was sampled, whether its result landed or not.
        keys: chain key of each of ``tokens``.
        landed: sampled tokens whose result landed.
        samples: sampled tokens that were scheduled.
        row: pool row, 0 for none. ``computed``: tokens whose KV is scheduled in that row. ``goal``: what is prefilled.
        out: forwards of it that are out.
        ended: Finish or Abort was sent, or the scheduler aborted it.
    """

    handle: int
    prompt: list[int]
    max_new_tokens: int
    namespace: bytes
    choice: int
    max_cached: int
    tokens: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    landed: int = 0
    samples: int = 0
    row: int = 0
    computed: int = 0
    goal: int = 0
    out: int = 0
    ended: bool = False
    cached_at_starts: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """The sampled tokens whose results landed."""
        return self.tokens[len(self.prompt) : len(self.prompt) + self.landed]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.keys.append(hash((self.keys[-1], token)))

    def sample(self) -> int:
        """The token this request's model puts after ``tokens``; it depends on them and on the choice only."""
        return 100 + (self.keys[-1] ^ (self.choice * 7919)) % 50


def expected_output(prompt: Sequence[int], count: int, *, namespace: bytes = b"", choice: int = 0) -> list[int]:
    """The ``count`` tokens that follow ``prompt`` whatever else runs."""
    request = PlayedRequest(0, list(prompt), count, namespace, choice, -1, list(prompt), chain_keys(namespace, prompt))
    for _ in range(count):
        request.append(request.sample())
    return request.tokens[len(prompt) :]


class KvCells:
    """The cells of all blocks of one group, ``granularity`` tokens a block."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.landed: set[int] = set()
        self._cells: dict[int, list[tuple[int, int, int] | None]] = {}
        self._bad: set[tuple[int, int]] = set()

    def write(self, block: int, position: int, key: int, forward_id: int, handle: int) -> None:
        cells = self._cells.setdefault(block, [None] * self.granularity)
        cells[position % self.granularity] = (key, forward_id, handle)

    def fail(self, forward_id: int, handle: int) -> None:
        """What ``handle`` wrote in that forward is worth nothing."""
        self._bad.add((forward_id, handle))

    def holds(self, table: Sequence[int], position: int, key: int) -> bool:
        """Whether the cell of ``position`` was written with that key, landed or not."""
        cell = self._cell(table, position)
        return cell is not None and cell[0] == key

    def publishable(self, table: Sequence[int], position: int, key: int) -> bool:
        """Whether the cell may be given to another request: right key, result landed, not failed."""
        cell = self._cell(table, position)
        return cell is not None and cell[0] == key and cell[1] in self.landed and cell[1:] not in self._bad

    def _cell(self, table: Sequence[int], position: int) -> tuple[int, int, int] | None:
        slot = position // self.granularity
        if slot >= len(table) or table[slot] not in self._cells:
            return None
        return self._cells[table[slot]][position % self.granularity]
