"""What the engine counts, and the snapshot it publishes a few times a second."""

import time
from collections.abc import Callable, Mapping, Sequence

from tokenspeed.device.handle import StepTimings
from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.messages.snapshot import (
    STATES,
    CounterSnapshot,
    FlowSnapshot,
    GroupSnapshot,
    RequestSnapshot,
    StateSnapshot,
    StepSnapshot,
)
from tokenspeed_scheduler import GroupCounts, Plan, RowKind, Scheduler

SNAPSHOT_INTERVAL_S = 0.2
MAX_REQUEST_ROWS = 200
SMOOTHING = 0.05
"""Weight of the newest step in the running means of the step's parts."""


class EngineStatistics:
    """Counters of one engine since it was ready. The loop's thread owns it."""

    def __init__(
        self,
        specs: DeviceSpecs,
        role: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        late_kernel_work: Callable[[], int] = int,
    ) -> None:
        """``late_kernel_work`` counts what a device's kernels should have done before serving."""
        self._specs = specs
        self._role = role
        self._clock = clock
        self._wall_clock = wall_clock
        self._late_kernel_work = late_kernel_work
        self._started = clock()
        self._last_snapshot = float("-inf")
        self._last_progress = wall_clock()
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

    def step_started(self, plan: Plan) -> None:
        """Counts the tokens of a plan that was handed to the device."""
        self.steps += 1
        decode = plan.kind == RowKind.DECODE
        self.decode_tokens += int(plan.input_len[decode].sum())
        self.prefill_tokens += int(plan.input_len[~decode].sum())

    def step_landed(self, timings: StepTimings) -> None:
        """Notes a step's result: progress, and where its time went.

        The bubble is the time in which the device had nothing to do between two steps that followed on each other.
        """
        now = self._clock()
        busy = timings.prepare + timings.forward + timings.sample
        since = now - self._last_landed
        if since < 1.0:
            self._mean("bubble", max(0.0, since - busy))
        self._mean("device", busy)
        self._last_landed = now
        self._last_progress = self._wall_clock()

    def round_ended(self, plan_s: float, commit_s: float) -> None:
        """Notes how long the loop planned and committed in a round."""
        self.rounds += 1
        self._mean("plan", plan_s)
        self._mean("commit", commit_s)

    def snapshot_is_due(self) -> bool:
        """Whether the last snapshot is older than SNAPSHOT_INTERVAL_S."""
        return self._clock() - self._last_snapshot >= SNAPSHOT_INTERVAL_S

    def snapshot(self, scheduler: Scheduler, live: Mapping[int, LiveRequest], held: int = 0) -> StateSnapshot:
        """Returns the whole picture, taken from the scheduler's own state; ``held`` requests wait before it."""
        self._last_snapshot = self._clock()
        counts = scheduler.snapshot()
        rows = scheduler.requests(MAX_REQUEST_ROWS)
        return StateSnapshot(
            time=self._wall_clock(),
            uptime_s=self._clock() - self._started,
            role=self._role,
            states={
                name: None if count < 0 else count for name, count in zip(STATES, counts.states.tolist(), strict=True)
            },
            groups=self._pool(counts.groups),
            host=self._pool(counts.host) if self._specs.host_parents else None,
            pending_operations=counts.pending_operations,
            flows=[
                FlowSnapshot(state_name(source), state_name(target), count) for source, target, count in counts.flows
            ],
            counters=CounterSnapshot(
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
            ),
            step=StepSnapshot(**{f"{part}_ms": seconds * 1e3 for part, seconds in self._means.items()}),
            running=counts.running,
            waiting=counts.waiting + held,
            held=held,
            last_progress=self._last_progress,
            has_work=scheduler.has_work() or held > 0,
            requests=[
                RequestSnapshot(
                    handle=row.handle,
                    request_id=live[row.handle].submit.request_id if row.handle in live else "",
                    state=state_name(row.state),
                    age_rounds=row.age_rounds,
                    priority=row.priority,
                    prompt_tokens=row.prompt_tokens,
                    computed_tokens=row.computed_tokens,
                    generated_tokens=row.generated_tokens,
                    cached_tokens=row.cached_tokens,
                    blocks=row.blocks,
                    retractions=row.retractions,
                    reason=row.reason,
                    output_limit=live[row.handle].limit if row.handle in live else 0,
                )
                for row in rows
            ],
            requests_omitted=max(0, counts.live - len(rows)),
        )

    def _pool(self, counts: Sequence[GroupCounts]) -> list[GroupSnapshot]:
        return [
            GroupSnapshot(
                group_id=group.group_id,
                kind=facts.kind,
                block_granularity=facts.block_granularity,
                bytes_per_block=facts.bytes_per_block,
                total=group.total,
                held=group.held,
                cached=group.cached,
                free=group.free,
                pinned=group.pinned,
            )
            for group, facts in zip(counts, self._specs.groups, strict=True)
        ]

    def _mean(self, part: str, seconds: float) -> None:
        mean = self._means[part]
        self._means[part] = seconds if mean == 0.0 else mean + SMOOTHING * (seconds - mean)


def state_name(state: int) -> str:
    """Returns the name of a state as the transition table and the dashboard spell it."""
    return STATES[int(state)]
