"""Random engines over groups and tiers, with every copy done for real: what must hold after every single call.

After each call: the scheduler's own walk, the balance of every pool, a second scheduler with the same inputs. What is
refused changes nothing; nobody is passed without bound; somebody always gets on. At the end the pools are whole and
every token is right, through whatever it was retracted, restored, written back, fetched or computed again.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from token_cache import MemoryStorage
from token_player import MIXES, PAGE, Asked, Player, cache_groups

from tokenspeed_scheduler import (
    Abort,
    Finish,
    ForgetCache,
    ForwardResult,
    OperationDone,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    Tick,
)
from tokenspeed_scheduler.reference import ReferenceScheduler

PICK = st.integers(min_value=0, max_value=1 << 20)


def fingerprint(scheduler: Any) -> list[tuple[str, object]]:
    """All that a scheduler says of itself, but for the number of its rounds."""
    snapshot = scheduler.snapshot()
    names = [name for name in dir(snapshot) if not name.startswith("_") and name != "round"]
    values: list[tuple[str, object]] = []
    for name in names:
        value = getattr(snapshot, name)
        if name in ("groups", "host"):
            value = [(c.group_id, c.total, c.held, c.cached, c.free, c.pinned) for c in value]
        values.append((name, value.tolist() if isinstance(value, np.ndarray) else value))
    rows = scheduler.requests(1 << 20)
    kept = [(row.handle, row.state, row.computed_tokens, row.blocks, row.retractions) for row in rows]
    return [*values, ("requests", kept)]


class RandomTiers(RuleBasedStateMachine):
    """Plays submit, plan, land, end, repeat and nonsense in any order that an event loop could produce."""

    make: Any = Scheduler

    @initialize(
        mix=st.sampled_from(MIXES),
        window=st.integers(1, 9),
        children=st.sampled_from([1, 2]),
        parents=st.integers(10, 24),
        seqs=st.integers(1, 4),
        budget=st.integers(8, 20),
        host=st.sampled_from([0, 6, 20, 50]),
        **{name: st.booleans() for name in ("host_cache", "storage", "overlap", "mixed")},
        prefix_cache=st.sampled_from([True, True, False]),
        overtakes=st.sampled_from([0, 2, 8]),
        fails=st.sampled_from([0, 0, 5]),
    )
    def build(self, *, mix: str, window: int, children: int, parents: int, **more: Any) -> None:
        tiered = bool(more["host"] and more["host_cache"] and more["prefix_cache"] and more["storage"])
        world = SchedulerConfig(
            groups=cache_groups(mix, window, children),
            num_parents=parents,
            prefix_granularity=PAGE,
            max_num_seqs=more["seqs"],
            max_scheduled_tokens=more["budget"],
            max_model_len=60,
            overlap_depth=int(more["overlap"]),
            mixed_batches=more["mixed"],
            prefix_cache=more["prefix_cache"],
            headroom_tokens=8,
            max_overtakes=more["overtakes"],
            host_parents=more["host"],
            host_cache=more["host_cache"],
            storage=tiered,
            storage_timeout_ticks=30,
        )
        self.player = Player(type(self).make, world, storage=MemoryStorage() if tiered else None, twin=True)
        self.fails, self.now = more["fails"], 0
        if self.fails:
            self.player.device.cache.fail_copy = lambda operation: operation.op_id % self.fails == 0
        self.bound = self.player.scheduler.max_single_request_tokens()
        self.handle = 0
        self.blocked = 0  # the oldest prompt that was found blocked for capacity, and who passed it since
        self.passed: set[int] = set()

    # What comes from outside.

    @rule(
        length=st.integers(1, 40),
        parts_at=st.sampled_from([0, 9, 22, 40]),
        new=st.integers(1, 20),
        declared=st.booleans(),
        priority=st.integers(-1, 1),
        namespace=st.sampled_from([b"", b"", b"tenant"]),
    )
    def submit(self, length: int, parts_at: int, new: int, **more: Any) -> None:
        """A prompt that shares a beginning with others; clamped to what the pool can hold."""
        length = min(length, self.bound - 1)
        new = min(new, self.bound - length)
        prompt = [position if position < parts_at else position + 50 * parts_at for position in range(length)]
        self.handle += 1
        self.player.submit(self.handle, Asked(prompt, new, **more))

    @rule(count=st.integers(2, 6), parts_at=st.sampled_from([9, 22, 40]), new=st.integers(1, 20))
    def submit_turns_of_a_chat(self, count: int, parts_at: int, new: int) -> None:
        """Prompts that grow by what was said, with other requests' blocks between them."""
        for turn in range(1, count + 1):
            self.submit(8 * turn, parts_at, new, declared=turn % 2 == 0, priority=0, namespace=b"")
            self.submit(6 * turn, 50 + turn, 3, declared=True, priority=0, namespace=b"")
            self.rounds(3 * turn)

    @rule(excess=st.integers(1, 5), length=st.integers(1, 40))
    def submit_what_can_never_fit(self, excess: int, length: int) -> None:
        before = fingerprint(self.player.scheduler)
        with pytest.raises(RequestRefused):
            self.player.submit(1 << 20, Asked([1] * length, max(1, self.bound + excess - length)))
        assert fingerprint(self.player.scheduler) == before
        for twin in self.player.schedulers[1:]:
            with pytest.raises(RequestRefused):
                twin.submit(1 << 20, np.ones(length, np.int32), max_new_tokens=max(1, self.bound + excess - length))

    @precondition(lambda self: self.player.scheduler.requests())
    @rule(pick=PICK, event=st.sampled_from([Abort, Finish]))
    def end(self, pick: int, event: type) -> None:
        handles = sorted(row.handle for row in self.player.scheduler.requests(1 << 20))
        self.player.end(handles[pick % len(handles)], event)

    @rule()
    def send_what_nobody_knows(self) -> None:
        before = self.player.scheduler.snapshot().ignored_results
        seven = np.full(2, 7, dtype=np.int32)
        self.player.advance([ForwardResult(1 << 30, seven), Abort(-7), Finish(1 << 30), OperationDone(1 << 40)])
        assert self.player.scheduler.snapshot().ignored_results >= before + 3

    @precondition(lambda self: any(flight.plan.num_rows for flight in self.player.flights))
    @rule()
    def send_a_batch_that_is_wrong(self) -> None:
        """The whole batch is refused: the abort before the wrong result does not happen either."""
        plan = next(flight.plan for flight in self.player.flights if flight.plan.num_rows)
        events = [Abort(int(plan.handle[0])), ForwardResult(plan.forward_id, np.zeros(plan.num_rows + 1, np.int32))]
        for scheduler in self.player.schedulers:
            before = fingerprint(scheduler)
            with pytest.raises(ValueError, match=r"rows"):
                scheduler.advance(events)
            assert fingerprint(scheduler) == before

    # What the loop does.

    @precondition(lambda self: len(self.player.flights) <= self.player.world.overlap_depth)
    @rule()
    def plan(self) -> None:
        before = fingerprint(self.player.scheduler)
        plan = self.player.plan()
        nothing = not (plan.num_rows or plan.aborts or plan.operations)
        if nothing and not any(delta.row.size for delta in plan.tables):
            after = fingerprint(self.player.scheduler)
            assert [entry for entry in after if entry[0] != "overtakes"] == [
                entry for entry in before if entry[0] != "overtakes"
            ], "an admission that was refused changed something"
        self._count_overtakes(plan)

    @precondition(lambda self: self.player.flights)
    @rule(again=st.booleans())
    def land(self, again: bool) -> None:
        events = self.player.land()
        if again:
            before = self.player.scheduler.snapshot().ignored_results
            self.player.advance(events)
            assert self.player.scheduler.snapshot().ignored_results >= before + bool(events)

    @rule(ticks=st.integers(0, 20))
    def time_passes(self, ticks: int) -> None:
        self.now += ticks
        self.player.advance([Tick(self.now)])

    @rule()
    def the_cache_is_forgotten(self) -> None:
        self.player.advance([ForgetCache()])
        if not self.player.flights:
            snapshot = self.player.scheduler.snapshot()
            held_by_nobody = [counts.cached for counts in snapshot.groups]
            assert held_by_nobody == [0] * len(held_by_nobody)

    @rule(answers=st.booleans())
    def the_storage_answers_or_is_slow(self, answers: bool) -> None:
        self.player.device.storage_answers = answers
        self.player.finish_operations()

    @rule(count=st.integers(1, 20))
    def rounds(self, count: int) -> None:
        while len(self.player.flights) > self.player.world.overlap_depth:
            self.player.land()
        for _ in range(count):
            self.player.round()
            self.check()

    # What must hold.

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "player"):
            return
        for scheduler in self.player.schedulers:
            scheduler.check_invariants()
        first, *others = [fingerprint(scheduler) for scheduler in self.player.schedulers]
        for other in others:
            assert first == other
        snapshot = self.player.scheduler.snapshot()
        for counts in (*snapshot.groups, *snapshot.host):
            used = counts.held + counts.cached + counts.free
            assert used == counts.total or (used < counts.total and len(self.player.groups) > 1)
            assert min(counts.held, counts.cached, counts.free, counts.pinned) >= 0
            assert counts.pinned <= counts.held + counts.cached

    def teardown(self) -> None:
        if not hasattr(self, "player"):
            return
        self.player.run(self.check)
        self.player.assert_right_tokens()
        self.player.assert_whole()
        assert set(self.player.aborted.values()) <= ({"capacity", "failed"} if self.fails else {"capacity"})

    def _count_overtakes(self, plan: Any) -> None:
        """Prompts that begin for the first time behind the oldest one that is blocked for capacity pass it."""
        new = {int(plan.handle[i]) for i in plan.starts.tolist() if self.player.begun[int(plan.handle[i])] == 1}
        rows = self.player.scheduler.requests(1 << 20)
        blocked = [row.handle for row in rows if self.player.scheduler.explain(row.handle).code == "capacity"]
        waiting = [handle for handle in blocked if handle not in self.player.begun]
        oldest = min(waiting, default=0)
        if oldest and oldest == self.blocked:
            self.passed |= {handle for handle in new if handle > oldest}
            assert len(self.passed) <= self.player.world.max_overtakes, f"{self.passed} passed request {oldest}"
        else:
            self.blocked, self.passed = oldest, set()


class RandomReferenceTiers(RandomTiers):
    make = ReferenceScheduler


QUICK = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
LONG = settings(QUICK, max_examples=800, stateful_step_count=80)

TestRandomTiers = RandomTiers.TestCase
TestRandomTiers.settings = QUICK
TestRandomReferenceTiers = RandomReferenceTiers.TestCase
TestRandomReferenceTiers.settings = settings(QUICK, max_examples=15)


@pytest.mark.long
class TestRandomTiersLong(RandomTiers.TestCase):  # type: ignore[misc]
    settings = LONG
