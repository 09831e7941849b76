"""Who gets a row, a chunk and blocks in a round, and in which order."""

import pytest
from kv_model import expected_output, prompt_of
from plan_checks import rows
from played_engine import Engine

from tokenspeed_scheduler import RowKind, State

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


def started(engine: Engine, handles: list[int], rounds: int = 200) -> list[int]:
    """Makes rounds until all of ``handles`` have started and returns the order in which they did."""
    order: list[int] = []
    for _ in range(rounds):
        plan = engine.round()
        order.extend(plan.handle[plan.starts].tolist())
        if set(handles) <= set(order):
            return [handle for handle in order if handle in handles]
    raise AssertionError(f"not all started: {order}")


def test_prompts_start_in_the_order_in_which_they_came() -> None:
    engine = Engine(budget=6, max_num_seqs=3)
    handles = [engine.submit(prompt_of(4 + salt % 3, salt), 3) for salt in range(9)]
    assert started(engine, handles) == handles


def test_the_larger_priority_goes_first_and_age_breaks_ties() -> None:
    engine = Engine(max_num_seqs=1)
    priorities = [0, 5, -3, 5, 0, 7]
    handles = [engine.submit(prompt_of(4, salt), 2, priority=p) for salt, p in enumerate(priorities)]
    order = started(engine, handles)
    assert order == [handles[i] for i in (5, 1, 3, 0, 4, 2)]


def test_a_later_prompt_of_higher_priority_goes_before_those_that_wait() -> None:
    engine = Engine(max_num_seqs=1)
    engine.submit(prompt_of(4), 10)
    engine.rounds(2)
    low = [engine.submit(prompt_of(4, salt), 2) for salt in (1, 2)]
    engine.rounds(2)
    high = engine.submit(prompt_of(4, 3), 2, priority=1)
    assert started(engine, [*low, high]) == [high, *low]


def test_priority_takes_nothing_from_those_that_run() -> None:
    engine = Engine(budget=4, max_num_seqs=2)
    first = engine.submit(prompt_of(12), 3)
    engine.round()
    engine.submit(prompt_of(12, 1), 3, priority=9)
    assert rows(engine.round())[0] == (first, "PREFILL", 4, 4)


# The budget of a round.


def test_decodes_come_out_of_the_budget_first() -> None:
    engine = Engine(budget=6)
    for salt in range(4):
        engine.submit(prompt_of(1, salt), 20)
    engine.round()
    late = engine.submit(prompt_of(30, 9), 4)
    plan = engine.round()
    assert rows(plan)[0] == (late, "PREFILL", 0, 2)
    assert plan.kind.tolist() == [RowKind.PREFILL] + [RowKind.DECODE] * 4
    assert int(plan.input_len.sum()) == 6
    engine.run()


def test_any_number_of_prompts_completes_and_the_last_is_cut() -> None:
    engine = Engine(budget=16)
    *whole, cut = (engine.submit(prompt_of(5, salt), 2) for salt in range(4))
    assert rows(engine.round()) == [*((handle, "PREFILL", 0, 5) for handle in whole), (cut, "PREFILL", 0, 1)]
    engine.run()


def test_a_cut_prompt_and_those_that_wait_take_turns() -> None:
    engine = Engine(budget=8)
    cut = engine.submit(prompt_of(40), 1)
    engine.round()
    first, second = (engine.submit(prompt_of(3, salt), 1) for salt in (1, 2))
    assert rows(engine.round()) == [(cut, "PREFILL", 8, 8)]
    # Their turn; the one that the budget cuts is the last of the round, and has what they leave.
    assert rows(engine.round()) == [(first, "PREFILL", 0, 3), (second, "PREFILL", 0, 3), (cut, "PREFILL", 16, 2)]
    third = engine.submit(prompt_of(3, 3), 1, priority=100)
    assert rows(engine.round()) == [(cut, "PREFILL", 18, 8)]
    assert rows(engine.round()) == [(third, "PREFILL", 0, 3), (cut, "PREFILL", 26, 5)]
    engine.run()


def test_without_others_a_cut_prompt_has_every_round() -> None:
    engine = Engine(budget=4)
    cut = engine.submit(prompt_of(16), 1)
    for _ in range(4):
        assert engine.round().handle.tolist() == [cut]


@pytest.mark.parametrize("budget", [1, 2, 3])
@OVERLAPS
def test_more_decoders_than_budget_all_end(budget: int, overlap: int) -> None:
    engine = Engine(budget=budget, overlap=overlap)
    handles = [engine.submit(prompt_of(3, salt), 9) for salt in range(6)]
    engine.run()
    for salt, handle in enumerate(handles):
        assert engine.done[handle].output == expected_output(prompt_of(3, salt), 9)
    engine.assert_whole()


def test_no_more_rows_than_max_num_seqs() -> None:
    engine = Engine(max_num_seqs=3, budget=64)
    for salt in range(10):
        engine.submit(prompt_of(4, salt), 5)
    assert engine.round().num_rows == 3
    assert (engine.count(State.SUBMITTED), engine.scheduler.snapshot().running) == (7, 3)
    engine.run()


# Mixed batches.


def test_a_mixed_batch_has_prefills_first_and_decodes_behind() -> None:
    engine = Engine(budget=16)
    old = engine.submit(prompt_of(4), 10)
    engine.rounds(2)
    new = engine.submit(prompt_of(6, 1), 3)
    assert rows(engine.round()) == [(new, "PREFILL", 0, 6), (old, "DECODE", 5, 1)]


@OVERLAPS
def test_without_mixing_a_round_has_one_kind_and_all_end(overlap: int) -> None:
    engine = Engine(mixed=False, overlap=overlap, budget=8)
    handles = [engine.submit(prompt_of(11, salt), 7) for salt in range(5)]
    engine.run()
    for salt, handle in enumerate(handles):
        assert engine.done[handle].output == expected_output(prompt_of(11, salt), 7)
    engine.assert_whole()


@OVERLAPS
def test_without_mixing_neither_kind_waits_for_the_others_end(overlap: int) -> None:
    engine = Engine(mixed=False, budget=16, overlap=overlap)
    old = engine.submit(prompt_of(4), 60)
    engine.rounds(3)
    new = engine.submit(prompt_of(6, 1), 60)
    assert {new, old} <= {handle for plan in engine.rounds(4) for handle in plan.handle.tolist()}


def test_without_mixing_a_spared_victim_does_not_join_the_decodes() -> None:
    """A prompt was left out as a victim; then room came from elsewhere, in a round that decodes already."""
    engine = Engine(num_parents=12, budget=6, overlap=1, mixed=False, prefix_cache=False)
    arrivals = {2: (2, 9), 3: (17, 13), 9: (4, 7), 12: (13, 1)}
    for count in range(20):
        if count in arrivals:
            length, new = arrivals[count]
            engine.submit(prompt_of(length, count), new, declared=False)
        plan = engine.plan()
        if count < 19:
            while len(engine.flights) > (1 if plan.num_rows else 0):
                engine.land()
    assert engine.state(4) == State.PREFILLING
    assert plan.handle.tolist() == [2], "the prompt was armed: it has a result out and is in nobody's way"
    engine.abort(3)
    engine.land()
    plan = engine.plan()
    assert plan.kind.tolist() == [RowKind.DECODE]
    engine.land()
    engine.run()
    engine.assert_whole()


# Capacity and overtaking.


def test_admission_is_for_the_chunk_and_not_for_the_whole_prompt() -> None:
    """The pool has room for a chunk of the second prompt, not for all of it beside the first: it begins anyway."""
    engine = Engine(num_parents=16, budget=8)
    first = engine.submit(prompt_of(24), 4)
    engine.rounds(3)
    second = engine.submit(prompt_of(48, 1), 4, declared=False)
    assert second in engine.round().handle.tolist()
    engine.run()
    assert engine.done[first].output == expected_output(prompt_of(24), 4)
    assert engine.done[second].output == expected_output(prompt_of(48, 1), 4)


@pytest.mark.parametrize("max_overtakes", [0, 1, 5])
@OVERLAPS
def test_the_oldest_blocked_prompt_is_overtaken_a_bounded_number_of_times(max_overtakes: int, overlap: int) -> None:
    """A holder runs; a prompt that needs nearly the whole pool waits; small ones that would fit come without end."""
    engine = Engine(num_parents=20, budget=80, max_num_seqs=6, max_overtakes=max_overtakes, overlap=overlap)
    engine.submit(prompt_of(8), 32)
    engine.round()
    large = engine.submit(prompt_of(72, 1), 4)
    overtook = 0
    for count in range(200):
        for salt in (2 * count, 2 * count + 1):
            engine.submit(prompt_of(4, 2 + salt % 70), 2)
        plan = engine.round()
        engine.check()
        began = plan.handle[plan.starts].tolist()
        if large in began:
            break
        overtook += len(began)
    assert large in began
    assert overtook <= max_overtakes
    assert overtook == max_overtakes or max_overtakes == 0, "smaller prompts may pass while the bound allows it"
    engine.run(check=False)
    assert engine.done[large].output == expected_output(prompt_of(72, 1), 4)


def test_a_blocked_prompt_is_planned_as_soon_as_there_is_room() -> None:
    engine = Engine(num_parents=10, budget=64)
    holder = engine.submit(prompt_of(28), 8)
    engine.rounds(2)
    blocked = engine.submit(prompt_of(30, 1), 4)
    assert blocked not in engine.round().handle.tolist()
    engine.abort(holder)
    assert blocked in engine.round().handle.tolist()
    engine.run()


def test_declared_lengths_wait_for_room_rather_than_be_retracted() -> None:
    engine = Engine(num_parents=20, budget=64)
    for salt in range(6):
        engine.submit(prompt_of(8, salt), 24, declared=True)
    engine.run()
    assert engine.scheduler.snapshot().retractions == 0
    engine.assert_whole()


# What may not be asked of it.


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
@OVERLAPS
def test_no_decode_beyond_max_new_tokens(max_new_tokens: int, overlap: int) -> None:
    """The engine is late with its Finish: nothing more is planned for the request meanwhile."""
    engine = Engine(overlap=overlap)
    handle = engine.submit(prompt_of(6), max_new_tokens)
    sampled = 0
    for _ in range(12):
        plan = engine.plan()
        sampled += int(plan.samples.sum())
        while len(engine.flights) > (overlap if plan.num_rows else 0):
            engine.land(finish=False)
    assert sampled == max_new_tokens
    assert engine.requests[handle].landed == max_new_tokens
    assert engine.scheduler.has_work()
    engine.finish(handle)
    engine.assert_whole()
