"""What a pool of so many parents holds, by the scheduler's own arithmetic: sizing and admission cannot disagree."""

from bisect import bisect_left
from collections.abc import Sequence

from tokenspeed.device.specs import GroupFacts
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed_scheduler import CacheGroup, SchedulerConfig, single_request_bound

NO_LIMIT = (1 << 31) - 1
"""Tokens; for a bound that only the pool sets."""


def scheduler_groups(facts: Sequence[GroupFacts]) -> list[CacheGroup]:
    """The cache groups as the scheduler takes them."""
    return [
        CacheGroup(
            group_id=group.group_id,
            kind=group.kind,
            block_granularity=group.block_granularity,
            children_per_parent=group.children_per_parent,
            sliding_window_tokens=group.sliding_window_tokens,
            checkpoint_granularity=group.checkpoint_granularity,
        )
        for group in facts
    ]


def longest_request(config: ResolvedConfig, facts: Sequence[GroupFacts], parents: int) -> int:
    """Tokens of the longest request that a pool of ``parents`` holds; 0 where it holds none.

    Raises ValueError, naming group and field, for groups that the scheduler refuses whatever the pool.
    """
    _bound(config, facts, NO_LIMIT // max(group.children_per_parent for group in facts) - 1)
    try:
        return _bound(config, facts, parents)
    except ValueError:  # so few parents that not even the shortest request fits
        return 0


def parents_for(config: ResolvedConfig, facts: Sequence[GroupFacts], tokens: int) -> int:
    """The least number of parents that hold one request of ``tokens``."""
    most = sum(-(-tokens // (group.block_granularity or tokens)) + 3 for group in facts)
    return bisect_left(range(most + 1), tokens, key=lambda parents: longest_request(config, facts, parents))


def _bound(config: ResolvedConfig, facts: Sequence[GroupFacts], parents: int) -> int:
    settings = config.scheduler
    return single_request_bound(
        SchedulerConfig(
            groups=scheduler_groups(facts),
            num_parents=parents,
            prefix_granularity=config.kv.granularity,
            max_num_seqs=settings.max_seqs,
            max_scheduled_tokens=settings.chunk,
            max_model_len=NO_LIMIT,
            overlap_depth=settings.overlap,
            prefix_cache=settings.prefix_cache,
        )
    )
