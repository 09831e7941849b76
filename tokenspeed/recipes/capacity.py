"""What a pool of KV cache holds, by the scheduler's own arithmetic: plan, sizing and admission cannot disagree.

The plan that is printed and the engine that allocates both come through here. No torch.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenspeed.recipes.dimensions import CACHE_TYPE_BYTES, CacheGroup
from tokenspeed.recipes.document import RecipeError

if TYPE_CHECKING:
    from tokenspeed_scheduler import CacheGroup as SchedulerGroup

NO_LIMIT = (1 << 31) - 1
"""Tokens; for a bound that only the pool sets."""


MOST_LARGEST = 16
"""A parent is at most so many of the largest blocks; beyond that blocks are padded."""

BLOCK_ALIGNMENT = 64
"""Bytes that padded blocks are a multiple of."""


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """One cache group as the scheduler takes it: logical tokens and whole blocks, no kernel geometry.

    Attributes:
        group_id: the group's name.
        kind: "full_history", "sliding_window" or "state".
        block_granularity: tokens of one block (history kinds), 0 for a state.
        children_per_parent: blocks in one parent.
        bytes_per_block: size of one block over all its layers.
        sliding_window_tokens: for sliding windows, else 0.
        checkpoint_granularity: for states, tokens between two that are kept; else 0.
    """

    group_id: str
    kind: str
    block_granularity: int
    children_per_parent: int
    bytes_per_block: int
    sliding_window_tokens: int = 0
    checkpoint_granularity: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The groups over one pool; a parent is the least size that every group's blocks divide."""

    facts: tuple[GroupFacts, ...]
    parent_bytes: int


class CapacitySettings(Protocol):
    """What the scheduler's arithmetic asks of the settings: a recipe's and the engine's both have it."""

    @property
    def max_seqs(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def overlap(self) -> int: ...
    @property
    def prefix_cache(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """A pool and what it holds.

    Attributes:
        parents: without the null parent.
        bytes: with it.
        wanted_len: tokens of the longest request that was asked for.
        holds: tokens of the longest request that the pool can hold, alone.
        per_request: parents that one request of ``wanted_len`` takes.
        requests: how many of ``wanted_len`` it holds at once.
    """

    parents: int
    bytes: int
    wanted_len: int
    holds: int
    per_request: int

    @property
    def requests(self) -> int:
        """How many requests of ``wanted_len`` the pool holds at once."""
        return self.parents // self.per_request if self.per_request else 0

    @property
    def max_len(self) -> int:
        """Tokens that a request may have: what was asked for, or what the pool holds."""
        return min(self.wanted_len, self.holds)


def group_bytes(group: CacheGroup, cache_type: str, tensor_parallel: int = 1, kv_heads: int = 0) -> int:
    """Bytes on one rank of one entry of ``group``: of one token, or so many as it stands for; of one state. Where there
    are fewer KV heads than ranks each rank has a whole one (``kv_heads`` 0: not known)."""
    ranks = 1 if group.replicated else tensor_parallel
    if kv_heads and group.kind != "state":
        ranks = min(ranks, kv_heads)
    return group.layers * -(-group.values_per_layer // ranks) * CACHE_TYPE_BYTES[group.kept_as(cache_type)]


def cache_shape(
    groups: Sequence[CacheGroup], cache_type: str, *, granularity: int, tensor_parallel: int = 1, kv_heads: int = 0
) -> CacheShape:
    """Blocks of ``granularity`` tokens for the history groups, one state a block for the others, on one rank."""
    sizes, parent = share_parents(
        [
            group_bytes(group, cache_type, tensor_parallel, kv_heads)
            * (1 if group.kind == "state" else _rows(group, granularity))
            for group in groups
        ]
    )
    facts = tuple(
        GroupFacts(
            group_id=group.id,
            kind=group.kind,
            block_granularity=0 if group.kind == "state" else granularity,
            children_per_parent=parent // size,
            bytes_per_block=size,
            sliding_window_tokens=group.window,
            checkpoint_granularity=group.checkpoint,
        )
        for group, size in zip(groups, sizes, strict=True)
    )
    return CacheShape(facts=facts, parent_bytes=parent)


def _rows(group: CacheGroup, granularity: int) -> int:
    """What ``granularity`` tokens leave in a history group; RecipeError where that is no whole number."""
    if granularity % group.stride:
        raise RecipeError(
            f"kv.granularity is {granularity} tokens, an entry of cache group {group.id!r} stands for {group.stride}; "
            "set kv.granularity to a multiple"
        )
    return granularity // group.stride


def share_parents(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Bytes of a block of each group, and of a parent that is a whole number of each.

    The least common multiple does, where it is no more than a few blocks of the largest. Else blocks are padded: a
    parent is a few of the largest, as many as waste least, and of the others as many as fit, each made a little longer.
    """
    largest = max(sizes)
    exact = math.lcm(*sizes)
    if exact <= MOST_LARGEST * largest:
        return tuple(sizes), exact
    best: tuple[tuple[int, ...], int] | None = None
    least = math.inf
    for count in range(1, MOST_LARGEST + 1):
        counts = [count * largest // size for size in sizes]
        unit = math.lcm(*counts) * BLOCK_ALIGNMENT
        parent = -(-count * largest // unit) * unit
        waste = max(1 - number * size / parent for number, size in zip(counts, sizes, strict=True))
        if waste < least - 0.005:  # a larger parent must be worth it
            best, least = (tuple(parent // number for number in counts), parent), waste
    assert best is not None, "a share that is wasted is below 1"
    return best


def size_pool(
    settings: CapacitySettings, shape: CacheShape, *, granularity: int, wanted_len: int, budget: int
) -> PoolSize:
    """The pool of at most ``budget`` bytes, for requests of ``wanted_len`` tokens."""
    parents = max(0, budget // shape.parent_bytes - 1)
    return PoolSize(
        parents=parents,
        bytes=(parents + 1) * shape.parent_bytes,
        wanted_len=wanted_len,
        holds=longest_request(settings, shape.facts, parents, granularity=granularity),
        per_request=parents_for(settings, shape.facts, wanted_len + settings.overlap, granularity=granularity),
    )


def wanted_bytes(settings: CapacitySettings, shape: CacheShape, *, granularity: int, wanted_len: int) -> int:
    """Bytes that let ``max_seqs`` requests of ``wanted_len`` tokens run at once, the null parent included."""
    each = parents_for(settings, shape.facts, wanted_len + settings.overlap, granularity=granularity)
    return (settings.max_seqs * each + 1) * shape.parent_bytes


def scheduler_groups(facts: Sequence[GroupFacts]) -> "list[SchedulerGroup]":
    """The cache groups as the scheduler takes them."""
    from tokenspeed_scheduler import CacheGroup as SchedulerGroup

    return [
        SchedulerGroup(
            group_id=group.group_id,
            kind=group.kind,
            block_granularity=group.block_granularity,
            children_per_parent=group.children_per_parent,
            sliding_window_tokens=group.sliding_window_tokens,
            checkpoint_granularity=group.checkpoint_granularity,
        )
        for group in facts
    ]


def longest_request(settings: CapacitySettings, facts: Sequence[GroupFacts], parents: int, *, granularity: int) -> int:
    """Tokens of the longest request that a pool of ``parents`` holds; 0 where it holds none.

    Raises ValueError, naming group and field, for groups that the scheduler refuses whatever the pool.
    """
    _bound(settings, facts, NO_LIMIT // max(group.children_per_parent for group in facts) - 1, granularity)
    if parents < 1:
        return 0
    try:
        return _bound(settings, facts, parents, granularity)
    except ValueError:  # so few parents that not even the shortest request fits
        return 0


def parents_for(settings: CapacitySettings, facts: Sequence[GroupFacts], tokens: int, *, granularity: int) -> int:
    """The least number of parents that hold one request of ``tokens``."""
    most = sum(-(-tokens // (group.block_granularity or tokens)) + 3 for group in facts)
    return bisect_left(
        range(most + 1),
        tokens,
        key=lambda parents: longest_request(settings, facts, parents, granularity=granularity),
    )


def _bound(settings: CapacitySettings, facts: Sequence[GroupFacts], parents: int, granularity: int) -> int:
    # Not at the top: the command line answers without it where nothing is planned.
    from tokenspeed_scheduler import SchedulerConfig, single_request_bound

    return single_request_bound(
        SchedulerConfig(
            groups=scheduler_groups(facts),
            num_parents=parents,
            prefix_granularity=granularity,
            max_num_seqs=settings.max_seqs,
            max_scheduled_tokens=settings.chunk,
            max_model_len=NO_LIMIT,
            overlap_depth=settings.overlap,
            prefix_cache=settings.prefix_cache,
        )
    )
