"""An engine without a model: what it shows is what its scheduler decided. No torch, no server, no threads."""

import time
from typing import Any

import msgspec

from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.engine.loop import EventLoop
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.launch.demo.clock import DemoClock
from tokenspeed.launch.demo.device import DemoDevice
from tokenspeed.launch.demo.load import DemoLoad
from tokenspeed.launch.demo.storage import DemoStorage
from tokenspeed.messages.snapshot import PhaseSnapshot, StateSnapshot
from tokenspeed.recipes.capacity import GroupFacts, scheduler_groups
from tokenspeed_scheduler import Role, Scheduler, SchedulerConfig

GRANULARITY = 64
BLOCK_BYTES = GRANULARITY * 12 * 2 * 8 * 64 * 2
"""Keys and values of 12 layers with 8 heads of 64 in bfloat16."""
PARENTS, HOST_PARENTS, STORAGE_BLOCKS = 560, 360, 3000
MAX_LEN, MAX_SEQS, CHUNK, OVERLAP = 8192, 24, 512, 1
HEADROOM_TOKENS = 128

GROUPS = (
    GroupFacts(
        group_id="full",
        kind="full_history",
        block_granularity=GRANULARITY,
        children_per_parent=1,
        bytes_per_block=BLOCK_BYTES,
    ),
    GroupFacts(
        group_id="window",
        kind="sliding_window",
        block_granularity=GRANULARITY,
        children_per_parent=1,
        bytes_per_block=BLOCK_BYTES,
        sliding_window_tokens=256,
    ),
)


SETTINGS: dict[str, int | bool] = {
    "scheduler.max_len": MAX_LEN,
    "scheduler.max_seqs": MAX_SEQS,
    "scheduler.chunk": CHUNK,
    "scheduler.overlap": OVERLAP,
    "scheduler.headroom": HEADROOM_TOKENS,
    "kv.granularity": GRANULARITY,
    "kv.bytes": (PARENTS + 1) * BLOCK_BYTES,
    "kv.host_bytes": (HOST_PARENTS + 1) * BLOCK_BYTES,
    "kv.storage_bytes": STORAGE_BLOCKS * BLOCK_BYTES,
}
SOURCE = "the script of --demo"


class Demo:
    """The scripted engine. ``advance`` lets time pass; the rest says what a server would say at that moment.

    Args:
        seed: of the load; one seed is one run.
        epoch: when it began, seconds since the epoch; None is now.
        scheduler: one of demo_world(), such as one with a journal around it; None makes one.
    """

    def __init__(self, seed: int = 0, epoch: float | None = None, scheduler: Scheduler | None = None) -> None:
        self._seed = seed
        self._epoch = time.time() if epoch is None else epoch
        self._clock = DemoClock()
        self._load = DemoLoad(self._clock, seed)
        self._phase = PhaseSnapshot(name="ready", done=0, total=0, since=self._epoch)
        specs = _specs()
        self._loop = EventLoop(
            scheduler=scheduler or Scheduler(demo_world()),
            handle=DemoDevice(self._clock, self._load.ends, DemoStorage(self._clock, STORAGE_BLOCKS, BLOCK_BYTES)),
            channel=self._load,
            statistics=EngineStatistics(specs, role="fused", clock=self._clock, wall_clock=self._wall_clock),
            max_model_len=MAX_LEN,
            overlap=OVERLAP,
            storage=True,
            clock=self._clock,
        )

    def advance(self, seconds: float) -> None:
        """Lets so much time pass."""
        self._load.horizon += seconds
        while self._clock.now < self._load.horizon:
            self._loop.round()

    def state(self) -> dict[str, Any]:
        """What ``GET /v1/internal/state`` would say."""
        return {
            **self._identity(),
            "vendor": "no device",
            "device": "",
            "devices": 0,
            "phase": "ready",
            "progress": msgspec.to_builtins(self._phase),
            "ready": True,
            "detail": "",
            "error": "",
            "lost": 0,
            "open_choices": self._load.open,
            "server_time": self._wall_clock(),
            "age_s": 0.0,
            "facts": {"max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS},
            "snapshot": msgspec.to_builtins(self._snapshot()),
        }

    def configuration(self) -> dict[str, Any]:
        """What ``GET /v1/internal/configuration`` would say."""
        return {
            **self._identity(),
            "started": self._epoch,
            "keys": [{"key": key, "value": value, "source": SOURCE} for key, value in SETTINGS.items()],
            "memory": {"predicted": {}, "observed": {}},
        }

    def detail(self, request: str) -> dict[str, Any] | None:
        """What ``GET /v1/internal/requests/{request}`` would say; None for one that is not known."""
        self._load.inspect(request)
        self._loop.round()
        detail = self._load.detail
        return None if detail is None else dict(msgspec.to_builtins(detail))

    def _snapshot(self) -> StateSnapshot:
        """The engine's, with what the process beside it knows of events and clients."""
        self._loop.publish_snapshot()
        snapshot = self._load.snapshot
        assert snapshot is not None, "the engine was asked for one"
        latency = self._load.answered.latency(self._clock.now)
        return msgspec.structs.replace(snapshot, events=list(self._load.events), latency=latency, phase=self._phase)

    def _identity(self) -> dict[str, Any]:
        return {"model": "demo", "recipe": "demo", "profile": f"seed {self._seed}", "recipe_hash": "scripted"}

    def _wall_clock(self) -> float:
        return self._epoch + self._clock.now


def demo_world() -> SchedulerConfig:
    """What the demo's scheduler knows of its world."""
    return SchedulerConfig(
        role=Role.FUSED,
        groups=scheduler_groups(GROUPS),
        num_parents=PARENTS,
        prefix_granularity=GRANULARITY,
        max_num_seqs=MAX_SEQS,
        max_scheduled_tokens=CHUNK,
        max_model_len=MAX_LEN,
        overlap_depth=OVERLAP,
        headroom_tokens=HEADROOM_TOKENS,
        host_parents=HOST_PARENTS,
        storage=True,
    )


def _specs() -> DeviceSpecs:
    return DeviceSpecs(
        groups=GROUPS,
        prefix_granularity=GRANULARITY,
        num_parents=PARENTS,
        kv_tokens=MAX_LEN,
        arena_bytes=(PARENTS + 1) * BLOCK_BYTES,
        host_parents=HOST_PARENTS,
        host_bytes=(HOST_PARENTS + 1) * BLOCK_BYTES,
        storage=True,
        weight_bytes=0,
        workspace_bytes=0,
        untouched_bytes=None,
        vocab_size=50_001,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        device="none",
        kernels={},
        kernel_doubts={},
    )
