"""What a test decides about the scheduler it plays against; the rest has defaults small enough to read."""

from dataclasses import dataclass

from tokenspeed_scheduler import CacheGroup, Role, SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fused role with one full-history group. ``prefix_granularity`` None: that of the blocks."""

    num_parents: int = 64
    granularity: int = 4
    prefix_granularity: int | None = None
    children: int = 1
    max_num_seqs: int = 8
    budget: int = 16
    max_model_len: int = 400
    overlap: int = 0
    mixed: bool = True
    prefix_cache: bool = True
    headroom: int = 4096
    max_overtakes: int = 8

    @property
    def page(self) -> int:
        return self.prefix_granularity or self.granularity

    @property
    def num_blocks(self) -> int:
        return self.num_parents * self.children

    def config(self) -> SchedulerConfig:
        """A fresh configuration of these settings."""
        group = CacheGroup(
            group_id="full",
            kind="full_history",
            block_granularity=self.granularity,
            children_per_parent=self.children,
        )
        return SchedulerConfig(
            role=Role.FUSED,
            groups=[group],
            num_parents=self.num_parents,
            prefix_granularity=self.page,
            max_num_seqs=self.max_num_seqs,
            max_scheduled_tokens=self.budget,
            max_model_len=self.max_model_len,
            overlap_depth=self.overlap,
            mixed_batches=self.mixed,
            prefix_cache=self.prefix_cache,
            headroom_tokens=self.headroom,
            max_overtakes=self.max_overtakes,
        )
