"""Planning while a result is out (overlap 1) and after it landed (overlap 0)."""

import pytest
from kv_model import expected_output, prompt_of
from plan_checks import rows
from played_engine import Engine

from tokenspeed_scheduler import RowKind, State


def test_a_decode_is_planned_before_its_first_token_is_known() -> None:
    engine = Engine(overlap=1)
    handle = engine.submit(prompt_of(6), 4)
    engine.plan()
    assert engine.state(handle) == State.PREFILL_DONE
    plan = engine.plan()
    assert rows(plan) == [(handle, "DECODE", 6, 1)]
    assert plan.input_ids.tolist() == [-1]
    assert engine.state(handle) == State.DECODING
    assert engine.scheduler.requests()[0].generated_tokens == 0


def test_every_decode_behind_a_result_that_is_out_reads_minus_one() -> None:
    engine = Engine(overlap=1)
    for salt in range(3):
        engine.submit(prompt_of(4, salt), 6)
    for plan in engine.rounds(6):
        ids = plan.input_ids[len(plan.input_ids) - int((plan.kind == RowKind.DECODE).sum()) :]
        assert (ids == -1).all()


def test_chunks_are_planned_behind_chunks_that_are_out() -> None:
    engine = Engine(overlap=1, budget=4)
    handle = engine.submit(prompt_of(10), 2)
    assert [rows(engine.plan())]
    assert rows(engine.plan()) == [(handle, "PREFILL", 4, 4)]
    engine.land()
    assert rows(engine.plan()) == [(handle, "PREFILL", 8, 2)]


def test_an_intermediate_chunk_reports_an_empty_result() -> None:
    engine = Engine(budget=4)
    handle = engine.submit(prompt_of(6), 2)
    plan = engine.plan()
    assert plan.samples.tolist() == [0]
    engine.land()
    (row,) = engine.scheduler.requests()
    assert (row.handle, row.computed_tokens, row.generated_tokens) == (handle, 4, 0)
    assert engine.scheduler.snapshot().ignored_results == 0


def test_overlap_takes_as_many_rounds_and_gives_the_same_tokens() -> None:
    outputs, steps = [], []
    for overlap in (0, 1):
        engine = Engine(overlap=overlap, budget=8)
        for salt in range(4):
            engine.submit(prompt_of(9, salt), 5 + salt)
        engine.run()
        outputs.append({handle: request.output for handle, request in engine.done.items()})
        steps.append(engine.last_forward_id)
        engine.assert_whole()
    assert outputs[0] == outputs[1]
    assert steps[0] == steps[1]


def test_no_wasted_decode_behind_the_last_token_of_max_new_tokens() -> None:
    """The scheduler knows the length: the round behind the last token has no row for the request."""
    engine = Engine(overlap=1)
    engine.submit(prompt_of(5), 3)
    assert [engine.plan().num_rows, engine.plan().num_rows] == [1, 1]
    engine.land()
    assert engine.plan().num_rows == 1
    engine.land()
    assert engine.plan().num_rows == 0


@pytest.mark.parametrize("behind", [False, True])
def test_a_stop_token_found_late_costs_one_discarded_result(behind: bool) -> None:
    """The loop sends Finish with the result that ends the request; the step behind it is out or not."""
    engine = Engine(overlap=1)
    handle = engine.submit(prompt_of(7), 30)
    other = engine.submit(prompt_of(7, 1), 9)
    engine.plan()
    if behind:
        engine.plan()
    engine.land()
    engine.finish(handle)
    assert engine.state(handle) == (State.FINISHING if behind else None)
    engine.run()
    assert engine.done[handle].landed == 1
    assert engine.done[other].output == expected_output(prompt_of(7, 1), 9)
    assert engine.scheduler.snapshot().ignored_results == 0
    engine.assert_whole()


def test_blocks_of_a_finishing_request_go_to_nobody() -> None:
    """The pool is empty but for what the ended request holds: the next prompt waits until the last result landed."""
    engine = Engine(overlap=1, num_parents=8, budget=32)
    ended = engine.submit(prompt_of(24), 8)
    engine.plan()
    engine.plan()
    engine.abort(ended)
    waiting = engine.submit(prompt_of(24, 1), 4)
    engine.land()
    assert engine.plan().num_rows == 0
    assert engine.state(waiting) == State.SUBMITTED
    engine.land()
    assert engine.plan().handle.tolist() == [waiting]
    engine.run()
    engine.assert_whole()
