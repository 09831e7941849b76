"""What the engine counts, and how often it tells."""

import time
from collections.abc import Callable

from tokenspeed.device.handle import StepTimings
from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.messages.snapshot import CounterSnapshot, StepSnapshot
from tokenspeed_scheduler import Plan, RowKind, Snapshot

SNAPSHOT_INTERVAL_S = 0.25
SMOOTHING = 0.05
"""Weight of the newest step in the running means of the step's parts."""


class EngineStatistics:
    """Counters of one engine since it was ready. The loop's thread owns it.

    Attributes:
        specs: of the device side. role: "fused", "prefill" or "decode".
        last_progress: seconds since the epoch when a step last landed.
    """

    def __init__(
        self,
        specs: DeviceSpecs,
        role: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        late_kernel_work: Callable[[], int] = int,
    ) -> None:
        """``late_kernel_work`` counts what a device's kernels should have done before serving."""
        self.specs = specs
        self.role = role
        self.wall_clock = wall_clock
        self._clock = clock
        self._late_kernel_work = late_kernel_work
        self._started = clock()
        self._last_snapshot = self._last_complete = float("-inf")
        self._watched_until = float("-inf")
        self.last_progress = wall_clock()
        self._last_landed = float("-inf")
        self._means = dict.fromkeys(("plan", "device", "commit", "bubble"), 0.0)
        self.rounds = 0
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.nan_rows = 0
        self.failed_steps = 0
        self.failed_copies = 0

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was ready."""
        return self._clock() - self._started

    def step_started(self, plan: Plan) -> None:
        """Counts the tokens of a plan that was handed to the device."""
        self.steps += 1
        decode = plan.kind == RowKind.DECODE
        self.decode_tokens += int(plan.input_len[decode].sum())
        self.prefill_tokens += int(plan.input_len[~decode].sum())

    def step_landed(self, timings: StepTimings) -> None:
        """Notes a step's result: progress, and where its time went.

        The bubble is the time in which the device had nothing to do between two steps that followed on each other: none
        where the second was queued there behind the first.
        """
        now = self._clock()
        busy = timings.prepare + timings.forward + timings.sample
        since = now - self._last_landed
        if since < 1.0:
            self._mean("bubble", 0.0 if timings.overlapped else max(0.0, since - busy))
        self._mean("device", busy)
        self._last_landed = now
        self.last_progress = self.wall_clock()

    def round_ended(self, plan_s: float, commit_s: float) -> None:
        """Notes how long the loop planned and committed in a round."""
        self.rounds += 1
        self._mean("plan", plan_s)
        self._mean("commit", commit_s)

    def watch(self, seconds: float) -> None:
        """Somebody looks for so long: snapshots are complete, the next one as soon as it may come."""
        now = self._clock()
        self._watched_until = max(self._watched_until, now + seconds)
        if now - self._last_complete >= SNAPSHOT_INTERVAL_S:
            self._last_snapshot = float("-inf")

    def snapshot_is_due(self) -> bool:
        """Whether the last snapshot is older than SNAPSHOT_INTERVAL_S."""
        return self._clock() - self._last_snapshot >= SNAPSHOT_INTERVAL_S

    def begin_snapshot(self) -> bool:
        """Notes that one is taken now; returns whether it is to be complete."""
        self._last_snapshot = self._clock()
        complete = self._last_snapshot < self._watched_until
        if complete:
            self._last_complete = self._last_snapshot
        return complete

    def step(self) -> StepSnapshot:
        """Where the time of the recent steps went."""
        return StepSnapshot(**{f"{part}_ms": seconds * 1e3 for part, seconds in self._means.items()})

    def counters(self, counts: Snapshot) -> CounterSnapshot:
        """Its own counts and the scheduler's."""
        return CounterSnapshot(
            rounds=self.rounds,
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            finished=self.finished,
            aborted=self.aborted,
            retractions=counts.retractions,
            nan_rows=self.nan_rows,
            failed_steps=self.failed_steps,
            ignored_results=counts.ignored_results,
            host_hit_tokens=counts.host_hit_tokens,
            storage_hit_tokens=counts.storage_hit_tokens,
            evictions=counts.evictions,
            host_evictions=counts.host_evictions,
            image_blocks=counts.image_blocks,
            restores=counts.restores,
            recomputed_tokens=counts.recomputed_tokens,
            storage_timeouts=counts.storage_timeouts,
            failed_copies=self.failed_copies,
            late_kernel_work=self._late_kernel_work(),
        )

    def _mean(self, part: str, seconds: float) -> None:
        mean = self._means[part]
        self._means[part] = seconds if mean == 0.0 else mean + SMOOTHING * (seconds - mean)
