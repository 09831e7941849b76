"""The life of a request in the fused role, seen through the snapshot and the list of requests."""

import pytest
from kv_model import expected_output, prompt_of
from plan_checks import rows
from played_engine import Engine

from tokenspeed_scheduler import Abort, Finish, State

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


def test_submitted_prefilling_prefill_done_decoding_finished() -> None:
    engine = Engine(budget=4)
    handle = engine.submit(prompt_of(10), 3)
    seen = [engine.state(handle)]
    for _ in range(5):
        engine.plan()
        seen.append(engine.state(handle))
        engine.land()
        engine.check()
    assert seen == [
        State.SUBMITTED,
        State.PREFILLING,
        State.PREFILLING,
        State.PREFILL_DONE,
        State.DECODING,
        State.DECODING,
    ]
    assert engine.state(handle) is None
    assert engine.count(State.FINISHED) == 1
    assert engine.done[handle].output == expected_output(prompt_of(10), 3)
    engine.assert_whole()


def test_chunks_of_a_prompt_over_many_rounds() -> None:
    engine = Engine(budget=8, num_parents=80)
    handle = engine.submit(prompt_of(203), 2)
    plans = engine.rounds(27)
    assert [rows(plan) for plan in plans[:25]] == [[(handle, "PREFILL", 8 * i, 8)] for i in range(25)]
    assert rows(plans[25]) == [(handle, "PREFILL", 200, 3)]
    assert rows(plans[26]) == [(handle, "DECODE", 203, 1)]
    assert [plan.samples.tolist() for plan in plans] == [[0]] * 25 + [[1], [1]]
    assert {int(plan.prompt_len[0]) for plan in plans} == {203}
    assert [plan.starts.tolist() for plan in plans] == [[0]] + [[]] * 26
    engine.assert_whole()


@pytest.mark.parametrize("budget", [1, 3, 5, 7, 64])
@pytest.mark.parametrize("granularity", [1, 4, 16])
@OVERLAPS
def test_any_chunk_and_block_size_gives_the_same_tokens(budget: int, granularity: int, overlap: int) -> None:
    engine = Engine(budget=budget, granularity=granularity, overlap=overlap, num_parents=200)
    handle = engine.submit(prompt_of(37), 11)
    engine.run()
    assert engine.done[handle].output == expected_output(prompt_of(37), 11)
    engine.assert_whole()


def test_a_request_row_says_how_far_it_is() -> None:
    engine = Engine(budget=4)
    handle = engine.submit(prompt_of(10), 5, priority=3)
    (row,) = engine.scheduler.requests()
    assert (row.handle, row.state, row.priority, row.prompt_tokens) == (handle, State.SUBMITTED, 3, 10)
    assert (row.computed_tokens, row.generated_tokens, row.cached_tokens, row.blocks, row.retractions) == (0,) * 5
    engine.round()
    (row,) = engine.scheduler.requests()
    assert (row.computed_tokens, row.generated_tokens) == (4, 0)
    assert row.blocks == len(engine.table(handle)) >= 1
    engine.rounds(4)
    (row,) = engine.scheduler.requests()
    assert (row.state, row.computed_tokens, row.generated_tokens) == (State.DECODING, 12, 3)


def test_age_counts_rounds_in_the_present_state() -> None:
    engine = Engine(budget=2)
    engine.submit(prompt_of(9), 4)
    ages = []
    for _ in range(4):
        engine.round()
        (row,) = engine.scheduler.requests()
        ages.append((State(row.state).name, row.age_rounds))
    assert [state for state, _ in ages] == ["PREFILLING"] * 4
    assert [age - ages[0][1] for _, age in ages] == [0, 1, 2, 3]


def test_the_requests_come_oldest_first_and_limited() -> None:
    engine = Engine(max_num_seqs=2)
    handles = [engine.submit(prompt_of(5, salt), 6, priority=salt) for salt in range(5)]
    engine.rounds(2)
    assert [row.handle for row in engine.scheduler.requests()] == handles
    assert [row.handle for row in engine.scheduler.requests(3)] == handles[:3]


def test_the_snapshot_counts_states_flows_and_tokens() -> None:
    engine = Engine(budget=4, max_num_seqs=2)
    for salt in range(3):
        engine.submit(prompt_of(6, salt), 3)
    snapshot = engine.scheduler.snapshot()
    assert (snapshot.live, snapshot.running, snapshot.waiting) == (3, 0, 3)
    engine.rounds(2)
    snapshot = engine.scheduler.snapshot()
    assert (snapshot.live, snapshot.running, snapshot.waiting) == (3, 2, 1)
    assert snapshot.states[State.SUBMITTED] == 1
    engine.run()
    snapshot = engine.scheduler.snapshot()
    assert (snapshot.live, snapshot.running, snapshot.waiting) == (0, 0, 0)
    assert (snapshot.prefill_tokens, snapshot.decode_tokens) == (18, 6)
    assert (snapshot.retractions, snapshot.ignored_results) == (0, 0)
    assert sum(count for _, target, count in snapshot.flows if target == State.FINISHED) == 3
    assert sum(count for source, _, count in snapshot.flows if source == State.SUBMITTED) == 3


def test_the_fused_role_shows_no_state_that_it_cannot_enter() -> None:
    states = Engine().scheduler.snapshot().states
    absent = {State.BOOTSTRAPPING, State.REMOTE_PREFILLING, State.PREFILL_AWAITING_RESULT}
    assert {State(i) for i, count in enumerate(states.tolist()) if count == -1} == absent
    assert len(states) == 12


def test_the_round_rises_with_every_plan_and_the_forward_id_with_every_batch() -> None:
    engine = Engine()
    first = engine.scheduler.snapshot().round
    assert engine.plan().forward_id == 0
    assert engine.scheduler.snapshot().round == first + 1
    engine.submit(prompt_of(4), 2)
    assert [plan.forward_id for plan in engine.rounds(3)] == [1, 2, 0]
    assert engine.scheduler.snapshot().round == first + 4


# Ends.


@OVERLAPS
def test_finish_with_a_result_out_goes_through_finishing(overlap: int) -> None:
    engine = Engine(overlap=overlap)
    handle = engine.submit(prompt_of(6), 20)
    engine.round()
    engine.plan()
    assert engine.flights
    held = engine.group()[0]
    engine.finish(handle)
    assert engine.state(handle) == State.FINISHING
    assert engine.group()[0] == held > 0, "a forward is still out against its blocks"
    assert engine.scheduler.snapshot().running == 0
    engine.check()
    while len(engine.flights) > 1:
        engine.land()
        assert engine.state(handle) == State.FINISHING
    engine.land()
    engine.assert_whole()
    assert engine.count(State.FINISHED) == 1


def test_finish_with_nothing_out_gives_the_blocks_back_at_once() -> None:
    engine = Engine()
    handle = engine.submit(prompt_of(6), 20)
    engine.rounds(3)
    engine.finish(handle)
    engine.assert_whole()
    assert engine.count(State.FINISHING) == 0


def test_a_finish_that_comes_with_the_result_ends_at_once() -> None:
    engine = Engine()
    handle = engine.submit(prompt_of(6), 20)
    engine.plan()
    engine.land(events=[Finish(handle)])
    assert engine.state(handle) is None
    engine.assert_whole()


def into(engine: Engine, handle: int, state: State) -> None:
    """Makes rounds until ``handle`` is in ``state``, with the last result out."""
    for _ in range(200):
        while len(engine.flights) > engine.overlap:
            engine.land(finish=False)
        engine.plan()
        if engine.state(handle) == state:
            return
    raise AssertionError(f"never {state.name}: {engine.states()}")


def pressed(overlap: int) -> tuple[Engine, int]:
    """Undeclared requests that outgrow the pool, and the handle of one that is retracted sooner or later."""
    engine = Engine(overlap=overlap, num_parents=12, budget=8)
    for salt in range(3):
        engine.submit(prompt_of(6, salt), 30, declared=False)
    for _ in range(200):
        engine.round()
        if engine.retracted():
            return engine, engine.retracted()[0]
    raise AssertionError("nobody was retracted")


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("state", [State.PREFILLING, State.PREFILL_DONE, State.DECODING])
@pytest.mark.parametrize("end", [Abort, Finish])
@OVERLAPS
def test_an_end_is_never_refused(overlap: int, end: type, state: State, landed: bool) -> None:
    engine = Engine(overlap=overlap, budget=4)
    handle = engine.submit(prompt_of(10), 20)
    other = engine.submit(prompt_of(9, 1), 6)
    into(engine, handle, state)
    if landed:
        while engine.flights:
            engine.land(finish=False)
    engine.advance([end(handle)])
    assert engine.state(handle) == (None if engine.requests.get(handle) is None else State.FINISHING)
    engine.check()
    engine.run()
    assert engine.done[other].output == expected_output(prompt_of(9, 1), 6)
    engine.assert_whole()


@pytest.mark.parametrize("end", [Abort, Finish])
def test_an_end_before_the_first_chunk(end: type) -> None:
    engine = Engine(max_num_seqs=1)
    first = engine.submit(prompt_of(6), 4)
    never = engine.submit(prompt_of(7, 1), 4)
    engine.round()
    engine.advance([end(never)])
    assert engine.state(never) is None
    engine.run()
    assert list(engine.done) == [never, first]
    assert engine.count(State.FINISHED) == 2
    engine.assert_whole()


@pytest.mark.parametrize("end", [Abort, Finish])
@OVERLAPS
def test_an_end_of_a_retracted_request(overlap: int, end: type) -> None:
    engine, handle = pressed(overlap)
    engine.advance([end(handle)])
    assert engine.state(handle) is None
    engine.run()
    assert handle not in {h for h, request in engine.done.items() if len(request.output) == 30}
    assert engine.count(State.FINISHED) == 3
    engine.assert_whole()


@OVERLAPS
def test_abort_and_finish_again_while_finishing_change_nothing(overlap: int) -> None:
    engine = Engine(overlap=overlap)
    handle = engine.submit(prompt_of(6), 20)
    engine.round()
    engine.plan()
    engine.abort(handle)
    for end in (Abort, Finish, Abort):
        engine.advance([end(handle)])
        assert engine.state(handle) == State.FINISHING
        engine.check()
    while engine.flights:
        engine.land()
    engine.assert_whole()
    assert engine.count(State.FINISHED) == 1


def test_a_row_is_taken_again_after_its_request_ended() -> None:
    engine = Engine(max_num_seqs=1)
    for salt in range(5):
        engine.submit(prompt_of(5, salt), 2)
    engine.run()
    assert all(len(request.output) == 2 for request in engine.done.values())
    engine.assert_whole()
