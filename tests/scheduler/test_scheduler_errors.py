"""What is refused, in which words, and that a refusal changes nothing."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_settings import Settings
from kv_model import expected_output, prompt_of
from played_engine import Engine

from tokenspeed_scheduler import (
    Abort,
    CacheGroup,
    Finish,
    ForwardResult,
    InvalidTransition,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    State,
    single_request_bound,
)

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


def group(**changes: Any) -> CacheGroup:
    values: dict[str, Any] = {"group_id": "full", "kind": "full_history", "block_granularity": 4}
    return CacheGroup(**(values | changes))


def whole_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "groups": [group()],
        "num_parents": 16,
        "prefix_granularity": 8,
        "max_num_seqs": 4,
        "max_scheduled_tokens": 16,
        "max_model_len": 100,
    }
    return SchedulerConfig(**(values | changes))


def submit(scheduler: Scheduler, handle: int, prompt: Any, max_new_tokens: int = 4, **more: Any) -> None:
    scheduler.submit(handle, np.asarray(prompt, dtype=np.int32), max_new_tokens=max_new_tokens, **more)


def fingerprint(scheduler: Scheduler) -> tuple[Any, ...]:
    """All that can be seen of a scheduler from outside."""
    snapshot = scheduler.snapshot()
    return (
        snapshot.states.tolist(),
        [(g.held, g.cached, g.free, g.pinned) for g in snapshot.groups],
        [(r.handle, int(r.state), r.computed_tokens, r.generated_tokens, r.blocks) for r in scheduler.requests()],
        snapshot.flows,
        (snapshot.round, snapshot.live, snapshot.running, snapshot.waiting, snapshot.ignored_results),
    )


# Configuration.


def test_the_configuration_that_the_others_are_made_from_is_valid() -> None:
    assert Scheduler(whole_config()).max_single_request_tokens() > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_parents", 0),
        ("num_parents", -1),
        ("prefix_granularity", 0),
        ("prefix_granularity", -8),
        ("max_num_seqs", 0),
        ("max_scheduled_tokens", 0),
        ("max_model_len", 0),
        ("overlap_depth", -1),
        ("overlap_depth", 2),
        ("headroom_tokens", -1),
        ("max_overtakes", -1),
        ("groups", []),
    ],
)
def test_a_configuration_error_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        whole_config(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_granularity", 0), ("block_granularity", -4), ("children_per_parent", 0), ("kind", "attention")],
)
def test_a_group_error_names_group_and_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as error:
        whole_config(groups=[group(group_id="odd-group", **{field: value})])
    assert "odd-group" in str(error.value)


def test_a_group_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="group_id"):
        whole_config(groups=[group(group_id="")])


def test_a_block_granularity_that_does_not_divide_the_prefix_granularity_is_refused() -> None:
    with pytest.raises(ValueError, match="block_granularity") as error:
        whole_config(groups=[group(block_granularity=3)])
    assert "full" in str(error.value)
    assert "prefix_granularity" in str(error.value)


def test_two_groups_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group_id.*full|full.*group_id"):
        whole_config(groups=[group(), group()])


def test_a_group_tells_what_it_was_made_of() -> None:
    made = group(group_id="g", block_granularity=8, children_per_parent=2)
    assert (made.group_id, made.kind, made.block_granularity, made.children_per_parent) == ("g", "full_history", 8, 2)


# Requests that can never run.


@pytest.mark.parametrize("granularity", [1, 4, 16])
@OVERLAPS
def test_at_the_bound_a_request_completes_and_beyond_it_is_refused(granularity: int, overlap: int) -> None:
    blocks = 5
    engine = Engine(num_parents=blocks, granularity=granularity, overlap=overlap, budget=6, max_model_len=1000)
    bound = engine.scheduler.max_single_request_tokens()
    assert blocks * granularity <= bound <= blocks * granularity + 1
    for new in {1, 2, bound // 2, bound - 1}:
        with pytest.raises(RequestRefused) as error:
            engine.submit(prompt_of(bound + 1 - new), new)
        assert str(bound) in str(error.value)
        assert str(bound + 1) in str(error.value)
        handle = engine.submit(prompt_of(bound - new), new)
        engine.run()
        assert engine.done[handle].output == expected_output(prompt_of(bound - new), new)
        engine.assert_whole()


@pytest.mark.parametrize("granularity", [1, 4, 16])
@OVERLAPS
def test_an_undeclared_length_may_reach_the_bound_and_beyond_it_ends_for_capacity(
    granularity: int, overlap: int
) -> None:
    """Nobody said how long it gets: it runs until it outgrows the pool, alone or not, and is then told why."""
    engine = Engine(num_parents=5, granularity=granularity, overlap=overlap, budget=6, max_model_len=1000)
    bound = engine.scheduler.max_single_request_tokens()
    for prompt in {1, bound // 2, bound - 1}:
        with pytest.raises(RequestRefused):
            engine.submit(prompt_of(bound), 1, declared=False)
        fits = engine.submit(prompt_of(prompt), bound - prompt, declared=False)
        engine.run()
        assert engine.done[fits].output == expected_output(prompt_of(prompt), bound - prompt)
        outgrows = engine.submit(prompt_of(prompt), bound + 9, declared=False)
        (abort,) = engine.until_aborted()
        assert (abort.handle, abort.reason) == (outgrows, "capacity")
        assert "max_new_tokens" in abort.detail
        output = engine.done[outgrows].output
        assert len(output) - (bound - prompt) in (0, 1), "the token sampled last needs no block"
        assert output == expected_output(prompt_of(prompt), len(output))
        engine.assert_whole()


def test_the_bound_before_a_scheduler_exists_is_the_same() -> None:
    for parents, children, overlap in [(5, 1, 0), (7, 2, 1), (100, 4, 0)]:
        made = Settings(num_parents=parents, children=children, overlap=overlap).config()
        assert single_request_bound(made) == Scheduler(made).max_single_request_tokens()


@pytest.mark.parametrize("children", [1, 2, 3])
def test_children_of_parents_are_blocks_like_others(children: int) -> None:
    engine = Engine(num_parents=6, children=children)
    bound = engine.scheduler.max_single_request_tokens()
    assert 6 * children * 4 <= bound <= 6 * children * 4 + 1
    handle = engine.submit(prompt_of(bound - 3), 3)
    engine.run()
    assert engine.done[handle].output == expected_output(prompt_of(bound - 3), 3)
    engine.assert_whole()


def test_a_request_longer_than_the_model_is_refused_with_both_figures() -> None:
    engine = Engine(num_parents=64, max_model_len=30)
    with pytest.raises(RequestRefused, match="max_model_len") as error:
        engine.submit(prompt_of(20), 11)
    assert "31" in str(error.value)
    assert "30" in str(error.value)
    engine.submit(prompt_of(20), 10)
    engine.run()
    engine.assert_whole()


def test_fifty_blocks_one_of_them_null_refuse_1002_tokens_and_serve_the_next() -> None:
    engine = Engine(num_parents=49, granularity=16, max_model_len=4000, budget=256)
    with pytest.raises(RequestRefused):
        engine.submit(prompt_of(1002), 1)
    handle = engine.submit(prompt_of(40), 4)
    engine.run()
    assert engine.done[handle].output == expected_output(prompt_of(40), 4)


@pytest.mark.parametrize("length", [98_305, 100_000, 106_496])
def test_the_null_block_is_no_capacity(length: int) -> None:
    scheduler = Scheduler(Settings(num_parents=12, granularity=8192, budget=8192, max_model_len=200_000).config())
    with pytest.raises(RequestRefused, match=str(length + 1)):
        submit(scheduler, 1, np.zeros(length), 1)
    assert not scheduler.has_work()


def test_a_refused_request_leaves_nothing_behind() -> None:
    engine = Engine(num_parents=8)
    engine.submit(prompt_of(6), 4)
    engine.rounds(2)
    before = fingerprint(engine.scheduler)
    for prompt, new in [(prompt_of(40), 4), ([], 4), (prompt_of(4), 0)]:
        with pytest.raises(ValueError):  # noqa: PT011 - RequestRefused is one; the texts have tests of their own
            engine.submit(prompt, new)
    assert fingerprint(engine.scheduler) == before
    engine.run()
    engine.assert_whole()


def test_request_refused_is_a_value_error_and_invalid_transition_a_runtime_error() -> None:
    assert issubclass(RequestRefused, ValueError)
    assert issubclass(InvalidTransition, RuntimeError)


def test_a_handle_that_lives_is_refused_again() -> None:
    scheduler = Scheduler(whole_config())
    submit(scheduler, 7, prompt_of(5))
    with pytest.raises(ValueError, match="7"):
        submit(scheduler, 7, prompt_of(6))
    assert [row.prompt_tokens for row in scheduler.requests()] == [5]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        submit(Scheduler(whole_config()), 1, [])


@pytest.mark.parametrize("new", [0, -1])
def test_a_request_for_no_token_is_refused(new: int) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        submit(Scheduler(whole_config()), 1, prompt_of(4), new)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int16, np.float32])
def test_a_prompt_of_another_dtype_is_not_converted(dtype: type) -> None:
    scheduler = Scheduler(whole_config())
    with pytest.raises(TypeError):
        scheduler.submit(1, np.zeros(4, dtype=dtype), max_new_tokens=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        scheduler.submit(1, [1, 2, 3], max_new_tokens=4)  # type: ignore[arg-type]
    assert not scheduler.has_work()


def test_a_prompt_of_two_dimensions_or_with_strides_is_not_converted() -> None:
    scheduler = Scheduler(whole_config())
    for array in (np.zeros((2, 2), dtype=np.int32), np.zeros(8, dtype=np.int32)[::2]):
        with pytest.raises(TypeError):
            scheduler.submit(1, array, max_new_tokens=4)


def test_the_prompt_is_the_schedulers_own_after_submit() -> None:
    scheduler = Scheduler(whole_config())
    prompt = np.arange(6, dtype=np.int32)
    scheduler.submit(1, prompt, max_new_tokens=4)
    prompt[:] = 0
    del prompt
    gc.collect()
    assert scheduler.plan().input_ids.tolist() == list(range(6))


# Events.


def result(forward_id: int, *tokens: int, failed: tuple[int, ...] | None = None) -> ForwardResult:
    broken = None if failed is None else np.asarray(failed, dtype=np.uint8)
    return ForwardResult(forward_id, np.asarray(tokens, dtype=np.int32), broken)


def test_arrays_of_a_result_are_not_converted() -> None:
    with pytest.raises(TypeError):
        ForwardResult(1, np.zeros(1, dtype=np.int64))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ForwardResult(1, [3])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ForwardResult(1, np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ForwardResult(1, np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32))  # type: ignore[arg-type]


def test_what_is_no_event_is_refused() -> None:
    scheduler = Scheduler(whole_config())
    for odd in (None, "finish", 3, object()):
        with pytest.raises(TypeError):
            scheduler.advance([odd])  # type: ignore[list-item]


def test_unknown_and_repeated_results_are_ignored_and_counted() -> None:
    scheduler = Scheduler(whole_config())
    submit(scheduler, 1, prompt_of(6))
    plan = scheduler.plan()
    scheduler.advance([result(plan.forward_id + 7, 1)])
    assert scheduler.snapshot().ignored_results == 1
    scheduler.advance([result(plan.forward_id, 11)])
    before = [(row.generated_tokens, row.computed_tokens) for row in scheduler.requests()]
    scheduler.advance([result(plan.forward_id, 12), result(0, 1), result(-1, 1)])
    assert scheduler.snapshot().ignored_results == 4
    assert [(row.generated_tokens, row.computed_tokens) for row in scheduler.requests()] == before == [(1, 6)]
    scheduler.check_invariants()


def test_a_result_twice_in_one_batch_counts_once() -> None:
    scheduler = Scheduler(whole_config())
    submit(scheduler, 1, prompt_of(6))
    forward_id = scheduler.plan().forward_id
    scheduler.advance([result(forward_id, 5), result(forward_id, 5)])
    assert scheduler.snapshot().ignored_results == 1
    assert scheduler.requests()[0].generated_tokens == 1


def test_events_of_unknown_and_ended_handles_are_ignored_and_counted() -> None:
    scheduler = Scheduler(whole_config())
    submit(scheduler, 1, prompt_of(6))
    scheduler.advance([Abort(1)])
    scheduler.advance([Abort(1), Finish(1), Finish(99), Abort(-5)])
    assert scheduler.snapshot().ignored_results == 4
    assert scheduler.snapshot().states[State.FINISHED] == 1
    scheduler.check_invariants()


def test_a_result_of_the_wrong_length_is_refused_with_both_lengths() -> None:
    scheduler = Scheduler(whole_config())
    submit(scheduler, 1, prompt_of(6))
    forward_id = scheduler.plan().forward_id
    for tokens in [(), (1, 2, 3)]:
        with pytest.raises(ValueError, match=rf"{len(tokens)}.*1|1.*{len(tokens)}"):
            scheduler.advance([result(forward_id, *tokens)])
    with pytest.raises(ValueError, match="failed"):
        scheduler.advance([result(forward_id, 4, failed=(0, 0))])
    scheduler.advance([result(forward_id, 4)])
    assert scheduler.requests()[0].generated_tokens == 1


BAD_BATCHES: dict[str, Callable[[int], list[Any]]] = {
    "no event behind good ones": lambda forward_id: [result(forward_id, 3, 4), Abort(3), "nonsense"],
    "wrong length behind good ones": lambda forward_id: [Finish(1), Abort(3), result(forward_id, 3)],
    "wrong length before good ones": lambda forward_id: [result(forward_id, 3), Finish(1)],
    "wrong failed behind good ones": lambda forward_id: [Abort(2), result(forward_id, 3, 4, failed=(1,))],
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_with_an_error_changes_nothing(name: str) -> None:
    scheduler, twin = Scheduler(whole_config()), Scheduler(whole_config())
    for each in (scheduler, twin):
        for handle in (1, 2, 3):
            submit(each, handle, prompt_of(8, handle), 4)
    plan, _ = scheduler.plan(), twin.plan()
    assert plan.num_rows == 2
    before = fingerprint(scheduler)
    with pytest.raises((TypeError, ValueError)):
        scheduler.advance(BAD_BATCHES[name](plan.forward_id))
    assert fingerprint(scheduler) == before
    scheduler.check_invariants()
    for each in (scheduler, twin):
        each.advance([result(plan.forward_id, 3, 4), Abort(3)])
    assert fingerprint(scheduler) == fingerprint(twin)
    assert scheduler.plan().input_ids.tolist() == twin.plan().input_ids.tolist()


def test_a_finish_before_its_result_in_one_batch_ends_the_request() -> None:
    """The order inside a batch does not matter to whether the blocks come back."""
    scheduler = Scheduler(whole_config())
    submit(scheduler, 1, prompt_of(6))
    forward_id = scheduler.plan().forward_id
    scheduler.advance([Finish(1), result(forward_id, 3)])
    assert not scheduler.has_work()
    assert scheduler.snapshot().groups[0].held == 0
    scheduler.check_invariants()


def test_an_empty_batch_changes_nothing() -> None:
    scheduler = Scheduler(whole_config())
    submit(scheduler, 1, prompt_of(6))
    before = fingerprint(scheduler)
    scheduler.advance([])
    assert fingerprint(scheduler) == before
