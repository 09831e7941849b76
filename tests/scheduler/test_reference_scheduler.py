"""The plain twin against the native scheduler: whatever the workload, a device of either gives the same tokens."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_device import expected_tokens
from token_player import MIXES, PAGE, Asked, Player, cache_groups, facts, play

from tokenspeed_scheduler import (
    Abort,
    CacheGroup,
    Finish,
    ForwardResult,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    State,
)
from tokenspeed_scheduler.reference import ReferenceScheduler


def config(*, parents: int = 12, seqs: int = 3, budget: int = 8, overlap: int = 0) -> SchedulerConfig:
    return SchedulerConfig(
        groups=[CacheGroup(group_id="full", kind="full_history", block_granularity=4)],
        num_parents=parents,
        prefix_granularity=4,
        max_num_seqs=seqs,
        max_scheduled_tokens=budget,
        max_model_len=400,
        overlap_depth=overlap,
    )


def mixed_world(mix: str, window: int, children: int, parents: int, seqs: int, **more: int) -> SchedulerConfig:
    """A small pool for any mix of groups, with everything that decides about sharing and room left to chance."""
    return SchedulerConfig(
        groups=cache_groups(mix, window, children),
        num_parents=parents,
        prefix_granularity=PAGE,
        max_num_seqs=seqs,
        max_scheduled_tokens=more["budget"],
        max_model_len=60,
        overlap_depth=more["overlap"],
        mixed_batches=bool(more["mixed"]),
        prefix_cache=bool(more["prefix_cache"]),
        host_parents=more["host"],
    )


WORLDS = st.builds(
    mixed_world,
    mix=st.sampled_from(MIXES),
    window=st.integers(1, 9),
    children=st.sampled_from([1, 2]),
    parents=st.integers(9, 16),
    seqs=st.integers(1, 4),
    budget=st.integers(8, 16),
    overlap=st.integers(0, 1),
    mixed=st.integers(0, 1),
    prefix_cache=st.integers(0, 1),
    host=st.sampled_from([0, 10]),
)
WORK = st.lists(
    st.builds(
        Asked,
        prompt=st.lists(st.integers(0, 5), min_size=1, max_size=20),
        new=st.integers(1, 12),
        gap=st.integers(0, 3),
        declared=st.booleans(),
        priority=st.integers(-1, 1),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(world=WORLDS, work=WORK)
def test_both_schedulers_give_the_same_tokens(world: SchedulerConfig, work: list[Asked]) -> None:
    bound = Scheduler(world).max_single_request_tokens()
    for asked in work:
        del asked.prompt[bound - 1 :]
        asked.new = min(asked.new, bound - len(asked.prompt))
    expected = {handle: expected_tokens(asked.prompt, asked.new, facts(world)) for handle, asked in enumerate(work)}
    assert play(Scheduler, world, work).outputs == expected
    assert play(ReferenceScheduler, world, work).outputs == expected


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_youngest_gives_way_and_computes_again(overlap: int) -> None:
    work = [Asked(list(range(8)), 20, declared=False), Asked(list(range(20, 30)), 20, declared=False)]
    player = play(ReferenceScheduler, config(parents=9, overlap=overlap), work)
    snapshot = player.scheduler.snapshot()
    assert snapshot.retractions > 0
    assert snapshot.recomputed_tokens > 0
    assert snapshot.states[State.FINISHED] == 2


def test_who_gave_way_comes_back_before_younger_ones_begin() -> None:
    player = Player(ReferenceScheduler, config(parents=9, seqs=2))
    for handle, prompt in enumerate(([0] * 8, [1] * 10, [2])):
        player.submit(handle, Asked(prompt, 20, declared=False))
    while player.begun.get(1, 0) < 2:
        assert 2 not in player.begun
        player.round()
    player.run(player.scheduler.check_invariants)
    player.assert_right_tokens()


def test_a_prompt_that_was_begun_goes_on_before_a_more_urgent_one_waits() -> None:
    """The urgent one has no row to begin in until the one that was begun has ended."""
    work = [Asked(list(range(20)), 4), Asked([7] * 6, 4, gap=1, priority=1)]
    player = play(ReferenceScheduler, config(seqs=1), work)
    assert player.begun == {0: 1, 1: 1}


def test_at_the_bound_a_request_completes_and_beyond_it_is_refused() -> None:
    world = config(parents=5, overlap=1)
    bound = ReferenceScheduler(world).max_single_request_tokens()
    assert play(ReferenceScheduler, world, [Asked(list(range(bound - 3)), 3)]).outputs[0]
    with pytest.raises(RequestRefused, match=f"one request can have {bound}"):
        Player(ReferenceScheduler, world).submit(1, Asked(list(range(bound - 3)), 4))


def test_what_outgrows_the_pool_is_ended_with_the_reason() -> None:
    player = Player(ReferenceScheduler, config(parents=3, overlap=1))
    player.submit(7, Asked([1, 2, 3], 300, declared=False))
    details = []
    while player.scheduler.has_work():
        details += [abort.detail for abort in player.plan().aborts]
        player.land()
    assert player.aborted == {7: "capacity"}
    assert details[0].startswith("request 7 has 13 tokens and outgrew the pool of 3 parents; give the KV cache more")
    assert len(player.outputs[7]) == 10
    player.assert_right_tokens()
    player.assert_whole()


def test_results_are_checked_before_any_event_applies() -> None:
    player = Player(ReferenceScheduler, config(overlap=1))
    player.submit(1, Asked([1, 2, 3], 9))
    player.submit(2, Asked([4], 9))
    first, second = player.scheduler.plan(), player.scheduler.plan()
    seven = np.array([7, 7], dtype=np.int32)
    for wrong in ([ForwardResult(second.forward_id, seven)], [Finish(1), ForwardResult(first.forward_id, seven[:1])]):
        with pytest.raises(ValueError, match="forward"):
            player.scheduler.advance(wrong)
        assert [row.state for row in player.scheduler.requests()] == [State.DECODING] * 2
    player.scheduler.advance([ForwardResult(first.forward_id, seven), ForwardResult(first.forward_id, seven)])
    assert player.scheduler.snapshot().ignored_results == 1
    player.scheduler.advance([ForwardResult(second.forward_id, seven), Abort(1), Finish(2), Abort(99)])
    assert player.scheduler.snapshot().ignored_results == 2
    assert not player.scheduler.has_work()


def test_a_failed_row_ends_its_request_unless_somebody_else_does() -> None:
    player = Player(ReferenceScheduler, config())
    for handle in (1, 2):
        player.submit(handle, Asked([handle, 2, 3], 9))
    plan = player.scheduler.plan()
    failed = np.array([1, 1], dtype=np.uint8)
    events = [ForwardResult(plan.forward_id, np.array([-1, -1], dtype=np.int32), failed), Abort(1)]
    player.scheduler.advance(events)
    assert [(abort.handle, abort.reason) for abort in player.scheduler.plan().aborts] == [(2, "failed")]
    assert not player.scheduler.has_work()


def test_it_says_why_a_request_waits() -> None:
    player = Player(ReferenceScheduler, config(seqs=1, overlap=1))
    player.submit(1, Asked([1, 2, 3], 1))
    player.submit(2, Asked([4], 1))
    first = player.scheduler.plan()
    codes = [player.scheduler.explain(handle).code for handle in (1, 2, 3)]
    assert codes == ["running", "queued", "ended"]
    player.scheduler.plan()
    assert player.scheduler.explain(1).code == "generation_done"
    player.scheduler.advance([Finish(1)])
    assert player.scheduler.explain(1).code == "ending"
    player.scheduler.advance([ForwardResult(first.forward_id, np.array([5], dtype=np.int32))])
    assert player.scheduler.explain(1).code == "ended"


def test_equal_inputs_give_equal_digests() -> None:
    digests = []
    for last in (4, 4, 5):
        player = Player(ReferenceScheduler, config())
        player.submit(1, Asked([1, 2, last], 9))
        digests.append(player.scheduler.plan().digest())
    assert digests[0] == digests[1] != digests[2]
