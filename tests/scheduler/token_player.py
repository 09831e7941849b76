"""An engine around any scheduler and a token device: whole groups and tiers, every copy for real, round by round."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from token_cache import group
from token_device import TokenDevice, TokenStep, expected_tokens

from tokenspeed.device.handle import OperationOutcome, RowStart
from tokenspeed.device.storage.backend import StorageBackend
from tokenspeed.messages import SamplingParameters
from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed_scheduler import (
    CacheGroup,
    Event,
    Finish,
    ForwardResult,
    OperationDone,
    OperationKind,
    Plan,
    Scheduler,
    SchedulerConfig,
)

STALLED_ROUNDS = 4
"""So many rounds in a row with live requests, nothing out and nothing planned are a stall."""

GRANULARITY = 2
PAGE = 4
MIXES = ("full", "window", "full window", "full state", "full window state")
"""Cache groups of a world, by the names that cache_groups knows."""

Make = Callable[[SchedulerConfig], Any]


def cache_groups(mix: str, window: int, children: int) -> list[CacheGroup]:
    """The groups that ``mix`` names; a parent holds ``children`` blocks of a history group, one state."""
    makers = {
        "full": lambda: CacheGroup(
            group_id="full", kind="full_history", block_granularity=GRANULARITY, children_per_parent=children
        ),
        "window": lambda: CacheGroup(
            group_id="window", kind="sliding_window", block_granularity=PAGE, sliding_window_tokens=window
        ),
        "state": lambda: CacheGroup(group_id="state", kind="state", checkpoint_granularity=2 * PAGE),
    }
    return [makers[name]() for name in mix.split()]


def facts(world: SchedulerConfig) -> list[GroupFacts]:
    """The cache groups as the device has them."""
    return [
        group(
            its.group_id,
            its.kind,
            its.block_granularity,
            children=its.children_per_parent,
            window=its.sliding_window_tokens,
            checkpoint=its.checkpoint_granularity,
        )
        for its in world.groups
    ]


@dataclass
class Asked:
    """One request of a workload; it comes in ``gap`` rounds after the one before."""

    prompt: list[int]
    new: int
    gap: int = 0
    declared: bool = True
    priority: int = 0
    namespace: bytes = b""


@dataclass(frozen=True)
class Flight:
    """A plan that the device has, and its result to come."""

    plan: Plan
    step: TokenStep


class Player:
    """The engine's loop in small. A second scheduler (``twin``) may get the same inputs: its plans must be equal.

    ``outputs`` is what came back, by handle; ``ended`` holds who got Finish or Abort or was given up (``aborted``).
    """

    def __init__(
        self, make: Make, world: SchedulerConfig, *, storage: StorageBackend | None = None, twin: bool = False
    ) -> None:
        self.world = world
        self.schedulers: list[Scheduler] = [make(world) for _ in range(1 + twin)]
        self.scheduler = self.schedulers[0]
        self.groups = facts(world)
        self.device = TokenDevice(
            granularity=world.prefix_granularity,
            num_blocks=world.num_parents,
            max_num_seqs=world.max_num_seqs,
            max_model_len=world.max_model_len,
            groups=self.groups,
            host_parents=getattr(world, "host_parents", 0),
            storage=storage,
        )
        self.asked: dict[int, Asked] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.aborted: dict[int, str] = {}
        self.begun: dict[int, int] = {}
        self.lost: set[int] = set()
        self.flights: deque[Flight] = deque()

    def submit(self, handle: int, asked: Asked) -> None:
        for scheduler in self.schedulers:
            scheduler.submit(
                handle,
                np.array(asked.prompt, dtype=np.int32),
                max_new_tokens=asked.new,
                declared=asked.declared,
                priority=asked.priority,
                namespace=asked.namespace,
            )
        self.asked[handle], self.outputs[handle] = asked, []

    def advance(self, events: Sequence[Event]) -> None:
        for scheduler in self.schedulers:
            scheduler.advance(events)

    def end(self, handle: int, event: type) -> None:
        self.ended.add(handle)
        self.advance([event(handle)])

    def plan(self) -> Plan:
        """Plans, executes, and compares with the twin."""
        plan, *others = [scheduler.plan() for scheduler in self.schedulers]
        for scheduler in self.schedulers:
            scheduler.check_invariants()
        for other in others:
            assert plan.digest() == other.digest(), "two schedulers with the same inputs plan differently"
        for abort in plan.aborts:
            self.ended.add(abort.handle)
            self.aborted[abort.handle] = abort.reason
        starts = [self._start(plan, index) for index in plan.starts.tolist()]
        for start in starts:
            self.begun[start.handle] = self.begun.get(start.handle, 0) + 1
        self.flights.append(Flight(plan, self.device.execute(plan, starts)))
        return plan

    def land(self) -> list[Event]:
        """Lands the oldest plan, ends whoever is complete, and returns the events."""
        flight = self.flights.popleft()
        result = flight.step.result()
        events = self._done(result.operations)
        handles = flight.plan.handle.tolist()
        self.lost |= self._lost_loads(flight.plan, result.operations)
        failed = np.array([handle in self.lost for handle in handles], dtype=np.uint8)
        tokens = np.where(failed == 1, -1, result.tokens).astype(np.int32)
        if handles:
            events.append(ForwardResult(flight.plan.forward_id, tokens, failed if failed.any() else None))
        for handle, token in zip(handles, tokens.tolist(), strict=True):
            if token < 0 or handle in self.ended:
                continue
            self.outputs[handle].append(token)
            if len(self.outputs[handle]) == self.asked[handle].new:
                self.ended.add(handle)
                events.append(Finish(handle))
        self.advance(events)
        return events

    def finish_operations(self) -> bool:
        """Hands over what the storage has done; returns whether there was anything."""
        events = self._done(self.device.finished_operations())
        if events:
            self.advance(events)
        return bool(events)

    def round(self) -> bool:
        """One round of the loop; returns whether anything moved."""
        moved = self.finish_operations()
        plan = self.plan()
        while len(self.flights) > (self.world.overlap_depth if plan.num_rows else 0):
            moved = bool(self.land()) or moved
        return moved or bool(plan.num_rows) or bool(plan.operations)

    def run(self, check: Callable[[], None]) -> None:
        """Rounds until nothing lives, with ``check`` after each; fails on a stall."""
        self.device.storage_answers = True
        while len(self.flights) > self.world.overlap_depth:
            self.land()
        idle = 0
        while self.scheduler.has_work():
            idle = 0 if self.round() else idle + 1
            check()
            assert idle < STALLED_ROUNDS, [(r.handle, r.state, r.reason) for r in self.scheduler.requests()]
        while self.flights:
            self.land()
        self.finish_operations()
        check()

    def assert_right_tokens(self) -> None:
        """Whoever was not cut short has all its tokens, the others a beginning of them."""
        for handle, asked in self.asked.items():
            output = self.outputs[handle]
            assert output == expected_tokens(asked.prompt, len(output), self.groups), f"request {handle}"

    def assert_whole(self) -> None:
        """Every block of every tier is free or cached; what one group has cached, the others cannot get for free."""
        snapshot = self.scheduler.snapshot()
        for tier in (snapshot.groups, snapshot.host):
            for counts in tier:
                others = sum(its.cached for its in tier) - counts.cached
                assert counts.held == counts.pinned == 0, counts.group_id
                assert counts.free + counts.cached <= counts.total, counts.group_id
                assert counts.free + counts.cached == counts.total or others, counts.group_id

    def _lost_loads(self, plan: Plan, outcomes: Sequence[OperationOutcome]) -> set[int]:
        """Requests whose blocks did not come back from the host: what their rows compute is worth nothing."""
        failed = {outcome.op_id for outcome in outcomes if outcome.succeeded is not None}
        return {one.handle for one in plan.operations if one.op_id in failed and one.kind == OperationKind.LOAD_BACK}

    def _done(self, outcomes: Sequence[OperationOutcome]) -> list[Event]:
        return [OperationDone(outcome.op_id, outcome.succeeded) for outcome in outcomes]

    def _start(self, plan: Plan, index: int) -> RowStart:
        handle = int(plan.handle[index])
        return RowStart(
            handle=handle,
            row=int(plan.row[index]),
            sampling=SamplingParameters(),
            prompt=np.array(self.asked[handle].prompt, dtype=np.int32),
            output=np.array(self.outputs[handle], dtype=np.int32),
        )


def play(make: Make, world: SchedulerConfig, work: Sequence[Asked]) -> Player:
    """Plays a workload to its end, with the invariants after every round."""
    player = Player(make, world)
    for handle, asked in enumerate(work):
        for _ in range(asked.gap):
            player.round()
        player.submit(handle, asked)
    player.run(player.scheduler.check_invariants)
    player.assert_whole()
    return player
