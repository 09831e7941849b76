"""A whole control plane over a TokenDevice, in one thread, for tests that drive it round by round."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from memory_channel import MemoryChannel
from token_device import TokenDevice

from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.device.storage.backend import StorageBackend
from tokenspeed.engine.held import GrammarCompiler
from tokenspeed.engine.loop import EventLoop
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.launch.compose import scheduler_config
from tokenspeed.messages import BadWords, Constraint, Pooling, SamplingParameters, Submit, ThinkingBudget
from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed.recipes.resolved import SchedulerSettings
from tokenspeed_scheduler import Scheduler


class ControlPlane:
    """Scheduler, loop, channel and device; ``loop.round()`` makes one round. One full-history group of ``granularity``
    unless ``groups`` says otherwise; ``num_blocks`` counts parents."""

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
        groups: Sequence[GroupFacts] = (),
        host_parents: int = 0,
        storage: StorageBackend | None = None,
        clock: Callable[[], float] = time.monotonic,
        telemetry_clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.device = TokenDevice(
            granularity=granularity,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            groups=groups,
            host_parents=host_parents,
            storage=storage,
        )
        specs = DeviceSpecs(
            groups=self.device.groups,
            prefix_granularity=granularity,
            num_parents=num_blocks,
            kv_tokens=0,
            arena_bytes=0,
            host_parents=host_parents,
            host_bytes=0,
            storage=storage is not None,
            weight_bytes=0,
            workspace_bytes=0,
            untouched_bytes=0,
            vocab_size=1000,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            device="test",
            kernels={},
            kernel_doubts={},
        )
        settings = SchedulerSettings(
            max_len=max_model_len, max_seqs=max_num_seqs, chunk=chunk, overlap=overlap, prefix_cache=prefix_cache
        )
        self.scheduler = Scheduler(scheduler_config(settings, specs))
        self.channel = MemoryChannel()
        self.loop = EventLoop(
            scheduler=self.scheduler,
            handle=self.device,
            channel=self.channel,
            statistics=EngineStatistics(specs, role="fused", clock=telemetry_clock, wall_clock=wall_clock),
            max_model_len=max_model_len,
            overlap=overlap,
            storage=specs.storage,
            grammars=grammars,
            clock=clock,
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
        groups = self.scheduler.snapshot().groups
        assert [(counts.held, counts.pinned) for counts in groups] == [(0, 0)] * len(groups)
        if len(groups) == 1:  # groups that share parents count the same empty one, each in its own blocks
            (counts,) = groups
            assert counts.free + counts.cached == counts.total == self.num_blocks


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
    constraint: Constraint | None = None,
    pooling: Pooling | None = None,
    bad_words: BadWords | None = None,
    thinking: ThinkingBudget | None = None,
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
        constraint=constraint,
        pooling=pooling,
        bad_words=bad_words,
        thinking=thinking,
    )
