"""The caches of a token device: blocks that hold token ids (or a running hash), block tables, and the tiers behind.

Parents are shared between groups as on a real device, so a block given to two requests, or a parent to two groups, at
the same time spoils what one of them reads. Storage operations are carried out when they are asked for, as late as can
be, so a host block that is not pinned until then shows too.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import OperationOutcome, StorageUsage
from tokenspeed.device.storage.backend import BlockKey, StorageBackend
from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed_scheduler import CacheOperation, OperationKind, Plan

STATE_WORDS = 4
"""int32 words of a state: a hash of 16 bytes."""

SAVES = (OperationKind.WRITE_BACK, OperationKind.IMAGE_SAVE)
LOADS = (OperationKind.LOAD_BACK, OperationKind.RESTORE)

Ints = NDArray[np.int32]


def absorb(state: bytes, tokens: Sequence[int]) -> bytes:
    """The state after ``tokens``; before the first token it is 16 zero bytes."""
    for token in tokens:
        state = hashlib.blake2b(state + int(token).to_bytes(4, "little"), digest_size=4 * STATE_WORDS).digest()
    return state


def group(
    group_id: str = "full",
    kind: str = "full_history",
    granularity: int = 4,
    *,
    children: int = 1,
    window: int = 0,
    checkpoint: int = 0,
) -> GroupFacts:
    """A cache group of a token device; a state's ``granularity`` is 0."""
    words = STATE_WORDS if kind == "state" else granularity
    return GroupFacts(
        group_id=group_id,
        kind=kind,
        block_granularity=0 if kind == "state" else granularity,
        children_per_parent=children,
        bytes_per_block=4 * words,
        sliding_window_tokens=window,
        checkpoint_granularity=checkpoint,
    )


class Pool:
    """Parents of one tier; ``view(g)`` is int32 [blocks, words] of a group, over the same memory for every group."""

    def __init__(self, groups: Sequence[GroupFacts], num_parents: int) -> None:
        words = lcm(*(facts.bytes_per_block // 4 * facts.children_per_parent for facts in groups))
        self._groups = groups
        self._memory = np.full((num_parents + 1, words), -1, dtype=np.int32)

    def block(self, index: int, block: int) -> Ints:
        """The words of one block, a view."""
        facts = self._groups[index]
        parent, child = divmod(block, facts.children_per_parent)
        assert parent > 0, f"the null parent of group {facts.group_id} is written, copied or read"
        words = facts.bytes_per_block // 4
        return self._memory[parent, child * words : (child + 1) * words]

    def gather(self, index: int, blocks: Ints) -> Ints:
        """The words of several blocks, one after another, a copy."""
        facts = self._groups[index]
        parents, children = np.divmod(blocks, facts.children_per_parent)
        assert (parents > 0).all(), f"the null parent of group {facts.group_id} is read"
        words = facts.bytes_per_block // 4
        return self._memory[parents[:, None], children[:, None] * words + np.arange(words)].reshape(-1)


class MemoryStorage:
    """A StorageBackend in a dictionary, which outlives the devices that use it."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, bytes] = {}

    def query(self, keys: Sequence[BlockKey]) -> NDArray[np.uint8]:
        return np.array([key in self.blocks for key in keys], np.uint8)

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> NDArray[np.uint8]:
        for key, buffer in zip(keys, buffers, strict=True):
            buffer.cast("B")[:] = self.blocks.get(key, b"\xff" * buffer.nbytes)
        return self.query(keys)

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> NDArray[np.uint8]:
        self.blocks.update(zip(keys, map(bytes, buffers), strict=True))
        return np.ones(len(keys), np.uint8)

    def usage(self) -> StorageUsage:
        size = sum(map(len, self.blocks.values()))
        return StorageUsage(blocks=len(self.blocks), bytes=size, limit_bytes=1 << 30)


@dataclass
class Tables:
    """Block tables of one group by pool row."""

    ids: Ints
    versions: NDArray[np.int64]

    def begin(self, row: int) -> None:
        self.ids[row] = 0
        self.versions[row] = 0

    def apply(self, delta) -> None:  # type: ignore[no-untyped-def]
        offset = 0
        for index in range(len(delta.row)):
            row, first, count = int(delta.row[index]), int(delta.first_slot[index]), int(delta.count[index])
            assert self.versions[row] == delta.version_from[index], "a block table is out of step"
            self.versions[row] = delta.version_to[index]
            self.ids[row, first : first + count] = delta.ids[offset : offset + count]
            self.ids[row, first + count :] = 0
            offset += count


@dataclass
class TokenCache:
    """Device and host pools, tables and storage; ``fail_copy(operation)`` plants a copy that fails.

    ``blocks`` counts the blocks that each kind of operation moved (or asked for).
    """

    groups: Sequence[GroupFacts]
    num_parents: int
    num_rows: int
    num_slots: int
    host_parents: int = 0
    storage: StorageBackend | None = None
    fail_copy: Callable[[CacheOperation], bool] = lambda operation: False
    blocks: Counter[OperationKind] = field(default_factory=Counter)
    pending: list[CacheOperation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = Pool(self.groups, self.num_parents)
        self.host = Pool(self.groups, self.host_parents)
        self.tables = [
            Tables(np.zeros((self.num_rows, self.num_slots), np.int32), np.zeros(self.num_rows, np.int64))
            for _ in self.groups
        ]

    def prepare(self, plan: Plan, rows: Sequence[int]) -> tuple[OperationOutcome, ...]:
        """Everything of a step before its batch, in the order that the contract gives; ``rows`` begin."""
        operations = plan.operations
        outcomes = [self._copy(one, self.device, self.host) for one in operations if one.kind in SAVES]
        self.pending += [one for one in operations if one.kind in _STORAGE]
        for row in rows:
            for tables in self.tables:
                tables.begin(row)
        for index, tables in enumerate(self.tables):
            tables.apply(plan.tables[index])
            for block in plan.zero_blocks[index].tolist():
                self.device.block(index, block)[:] = 0
            pairs = [(target, self.device.block(index, source).copy()) for source, target in plan.copy_blocks[index]]
            for target, words in pairs:
                self.device.block(index, target)[:] = words
        return (*outcomes, *(self._copy(one, self.host, self.device) for one in operations if one.kind in LOADS))

    def finish_storage(self, *, all_at_once: bool = True) -> list[OperationOutcome]:
        """Carries out the storage operations that are pending, or only the oldest."""
        count = len(self.pending) if all_at_once else 1
        done, self.pending = self.pending[:count], self.pending[count:]
        return [OperationOutcome(op_id=one.op_id, succeeded=self._store(one)) for one in done]

    def _copy(self, operation: CacheOperation, source: Pool, target: Pool) -> OperationOutcome:
        self.blocks[operation.kind] += operation.group.size
        if self.fail_copy(operation):
            return OperationOutcome(op_id=operation.op_id, succeeded=np.zeros(operation.group.size, np.uint8))
        columns = (operation.group.tolist(), operation.source.tolist(), operation.target.tolist())
        for index, start, end in zip(*columns, strict=True):
            target.block(index, end)[:] = source.block(index, start)
        return OperationOutcome(op_id=operation.op_id)

    def _store(self, operation: CacheOperation) -> NDArray[np.uint8]:
        assert self.storage is not None, "a storage operation without a storage"
        self.blocks[operation.kind] += operation.digests.shape[0]
        groups = operation.group.tolist()
        keys = [
            BlockKey(digest.tobytes(), self.groups[index].group_id, offset)
            for digest, index, offset in zip(operation.digests, groups, operation.offsets.tolist(), strict=True)
        ]
        if operation.kind == OperationKind.STORAGE_QUERY:
            return self.storage.query(keys)
        fetch = operation.kind == OperationKind.STORAGE_FETCH
        ids = (operation.target if fetch else operation.source).tolist()
        buffers = [memoryview(self.host.block(*place).view(np.uint8)) for place in zip(groups, ids, strict=True)]
        return self.storage.get(keys, buffers) if fetch else self.storage.put(keys, buffers)


_STORAGE = (OperationKind.STORAGE_QUERY, OperationKind.STORAGE_FETCH, OperationKind.STORAGE_PUT)
