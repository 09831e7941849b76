"""A random engine against the scheduler: every rule of Engine after every call, in pools so small that all happens.

After each call: the scheduler's own walk, pool balance, state against resources, tables against tokens, a second
scheduler with the same inputs. At the end: everybody ends, no round is wasted, the pool is whole, all tokens are right.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_model import expected_output, prompt_of
from played_engine import Engine

from tokenspeed_scheduler import Abort, Finish, ForwardResult, RequestRefused, State, transition_table

ARROWS = {(state, target) for state, _, successors in transition_table() for target in successors}
NAMESPACES = (b"", b"tenant")
PICK = st.integers(min_value=0, max_value=1 << 20)


def name_of(state: int) -> str:
    return State(state).name.title().replace("_", "")


class RandomEngine(RuleBasedStateMachine):
    """Plays submit, plan, land, finish, abort and failed rows in any order that an event loop could produce."""

    overlap = 0

    @initialize(
        parents=st.integers(4, 18),
        granularity=st.sampled_from([1, 2, 4]),
        pages=st.sampled_from([1, 2]),
        children=st.sampled_from([1, 1, 2]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        mixed=st.booleans(),
        prefix_cache=st.sampled_from([True, True, False]),
        headroom=st.sampled_from([0, 4, 4096]),
        max_overtakes=st.sampled_from([0, 2, 8]),
    )
    def build(self, parents: int, granularity: int, pages: int, **more: Any) -> None:
        self.engine = Engine(
            num_parents=parents,
            granularity=granularity,
            prefix_granularity=granularity * pages,
            overlap=self.overlap,
            twin=True,
            **more,
        )
        self.bound = self.engine.scheduler.max_single_request_tokens()
        self.complete: set[int] = set()
        self.submits = 0

    # What comes from outside.

    @rule(
        length=st.integers(1, 40),
        parts_at=st.integers(0, 40),
        family=st.integers(0, 1),
        new=st.integers(1, 24),
        declared=st.booleans(),
        priority=st.integers(-1, 1),
        namespace=st.sampled_from(NAMESPACES),
        max_cached=st.sampled_from([-1, -1, -1, 0, 5]),
    )
    def submit(self, length: int, parts_at: int, family: int, new: int, **more: Any) -> None:
        """A prompt of one of two families that parts from it somewhere; clamped to what the pool can hold."""
        length = min(length, self.bound - 1)
        new = min(new, self.bound - length)
        prompt = [*prompt_of(parts_at, family)[:length], *prompt_of(length, 40 + parts_at)][:length]
        self.submits += 1
        self.engine.submit(prompt, new, choice=self.submits % 3, **more)

    @rule(excess=st.integers(1, 5), length=st.integers(1, 40))
    def submit_what_can_never_fit(self, excess: int, length: int) -> None:
        length = min(length, self.bound)
        with pytest.raises(RequestRefused):
            self.engine.submit(prompt_of(length), self.bound + excess - length)

    @precondition(lambda self: self.engine.requests)
    @rule(pick=PICK, end=st.sampled_from([Abort, Finish]))
    def end(self, pick: int, end: type) -> None:
        self.engine.advance([end(self._picked(pick))])

    @rule(forward_id=st.sampled_from([0, -1, 1 << 30]), handle=st.sampled_from([0, -7, 1 << 30]))
    def send_what_nobody_knows(self, forward_id: int, handle: int) -> None:
        before = self.engine.scheduler.snapshot().ignored_results
        events = [ForwardResult(forward_id, np.zeros(2, dtype=np.int32)), Abort(handle), Finish(handle)]
        self.engine.advance(events)
        assert self.engine.scheduler.snapshot().ignored_results == before + 3

    # What the loop does.

    @precondition(lambda self: len(self.engine.flights) <= self.engine.overlap)
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.flights)
    @rule()
    def land(self) -> None:
        self.engine.land()

    @precondition(lambda self: self.engine.flights)
    @rule(pick=PICK)
    def land_with_a_failed_row(self, pick: int) -> None:
        handles = self.engine.flights[0].handles
        alive = [handle for handle in handles if not self.engine.requests[handle].ended]
        self.engine.land(failed={alive[pick % len(alive)]} if alive else ())

    @precondition(lambda self: self.engine.flights)
    @rule()
    def land_all_rows_failed(self) -> None:
        handles = self.engine.flights[0].handles
        self.engine.land(failed=[handle for handle in handles if not self.engine.requests[handle].ended])

    @precondition(lambda self: self.engine.flights)
    @rule(pick=PICK, end=st.sampled_from([Abort, Finish]))
    def land_and_end_in_one_batch(self, pick: int, end: type) -> None:
        self.engine.land(finish=False, events=[end(self._picked(pick))])

    @precondition(lambda self: self.engine.flights)
    @rule()
    def land_and_be_late_with_finish(self) -> None:
        self.engine.land(finish=False)

    @rule(count=st.integers(1, 12))
    def rounds(self, count: int) -> None:
        """The loop as it is, for a while, so that requests get far."""
        while len(self.engine.flights) > self.engine.overlap:
            self.engine.land()
        for _ in range(count):
            self.engine.round()
            self.engine.check()

    @rule()
    def finish_the_late(self) -> None:
        late = [h for h, r in self.engine.requests.items() if r.landed == r.max_new_tokens and not r.ended]
        self.engine.finish(*late)

    # What must hold.

    @invariant()
    def all_rules_hold(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    @invariant()
    def flows_balance(self) -> None:
        """Every arrow is in the table, and what came in and did not go out is there."""
        if not hasattr(self, "engine"):
            return
        snapshot = self.engine.scheduler.snapshot()
        balance = dict.fromkeys(range(12), 0)
        balance[State.SUBMITTED] = self.engine.submitted
        for source, target, count in snapshot.flows:
            assert (name_of(source), name_of(target)) in ARROWS
            balance[source] -= count
            balance[target] += count
        assert [balance[state] for state in range(12)] == [max(count, 0) for count in snapshot.states.tolist()]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while len(self.engine.flights) > self.engine.overlap:
            self.engine.land()
        self.engine.run(4000)
        self.engine.assert_whole()
        assert self.engine.count(State.FINISHED) == self.engine.submitted
        for request in self.engine.done.values():
            expected = expected_output(
                request.prompt, request.max_new_tokens, namespace=request.namespace, choice=request.choice
            )
            assert request.output == expected[: request.landed]

    def _picked(self, pick: int) -> int:
        handles = sorted(self.engine.requests)
        return handles[pick % len(handles)]


class RandomEngineWithOverlap(RandomEngine):
    overlap = 1


QUICK = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
LONG = settings(QUICK, max_examples=800, stateful_step_count=80)

TestRandomEngine = RandomEngine.TestCase
TestRandomEngine.settings = QUICK
TestRandomEngineWithOverlap = RandomEngineWithOverlap.TestCase
TestRandomEngineWithOverlap.settings = QUICK


@pytest.mark.long
class TestRandomEngineLong(RandomEngine.TestCase):  # type: ignore[misc]
    settings = LONG


@pytest.mark.long
class TestRandomEngineWithOverlapLong(RandomEngineWithOverlap.TestCase):  # type: ignore[misc]
    settings = LONG
