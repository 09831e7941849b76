"""A whole control plane over a TokenDevice, in one thread, for tests that drive it round by round."""

from collections.abc import Sequence

import numpy as np
from memory_channel import MemoryChannel
from token_device import TokenDevice

from tokenspeed.device.specs import DeviceSpecs, GroupFacts
from tokenspeed.engine.loop import EventLoop
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.messages import SamplingParameters, Submit
from tokenspeed_scheduler import CacheGroup, Scheduler, SchedulerConfig


class ControlPlane:
    """Scheduler, loop, channel and device; ``loop.round()`` makes one round."""

    def __init__(
        self,
        *,
        overlap: int = 1,
        num_blocks: int = 64,
        granularity: int = 4,
        max_num_seqs: int = 8,
        chunk: int = 16,
        max_model_len: int = 200,
        prefix_cache: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(
            SchedulerConfig(
                groups=[CacheGroup(group_id="full", kind="full_history", block_granularity=granularity)],
                num_parents=num_blocks,
                prefix_granularity=granularity,
                max_num_seqs=max_num_seqs,
                max_scheduled_tokens=chunk,
                max_model_len=max_model_len,
                overlap_depth=overlap,
                prefix_cache=prefix_cache,
            )
        )
        self.device = TokenDevice(
            granularity=granularity, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self.channel = MemoryChannel()
        specs = DeviceSpecs(
            groups=(
                GroupFacts(
                    group_id="full",
                    kind="full_history",
                    block_granularity=granularity,
                    children_per_parent=1,
                    bytes_per_block=granularity * 4,
                ),
            ),
            prefix_granularity=granularity,
            num_parents=num_blocks,
            arena_bytes=0,
            weight_bytes=0,
            workspace_bytes=0,
            vocab_size=1000,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            device="test",
            kernels={},
        )
        self.loop = EventLoop(
            scheduler=self.scheduler,
            handle=self.device,
            channel=self.channel,
            statistics=EngineStatistics(specs, role="fused"),
            max_model_len=max_model_len,
            overlap=overlap,
        )

    def until_quiet(self, rounds: int = 5000) -> None:
        """Makes rounds until nothing lives; fails where that takes too many."""
        waited = self.channel.waits
        for _ in range(rounds):
            self.loop.round()
            self.scheduler.check_invariants()
            if self.channel.waits > waited:
                return
        raise AssertionError(f"still busy after {rounds} rounds")

    def assert_pool_is_whole(self) -> None:
        (group,) = self.scheduler.snapshot().groups
        assert group.held == 0
        assert group.free + group.cached == group.total == self.num_blocks


def submit(
    handle: int,
    prompt: Sequence[int],
    max_new_tokens: int = 8,
    *,
    stop_token_ids: tuple[int, ...] = (),
    declared: bool = True,
    priority: int = 0,
    namespace: bytes = b"",
    sampling: SamplingParameters | None = None,
) -> Submit:
    return Submit(
        handle=handle,
        request_id=f"request-{handle}",
        prompt=np.asarray(prompt, dtype=np.int32).tobytes(),
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingParameters(stop_token_ids=stop_token_ids),
        declared=declared,
        priority=priority,
        namespace=namespace,
    )
