"""What one result turns into, row by row."""

import numpy as np
from control_plane import submit

from tokenspeed.device.handle import StepResult, StepTimings
from tokenspeed.engine.commit import commit_failure, commit_result
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.messages import PromptLogprobs, SamplingParameters, TokenLogprobs

TIMINGS = StepTimings(queued=0.0, prepare=0.0, forward=0.0, sample=0.0)


def live_of(*submits) -> dict[int, LiveRequest]:
    return {one.handle: LiveRequest.of(one, 100) for one in submits}


def result_of(tokens: list[int], **more) -> StepResult:
    nan = more.pop("nan", [False] * len(tokens))
    return StepResult(forward_id=1, tokens=np.array(tokens, np.int32), nan=np.array(nan), timings=TIMINGS, **more)


def test_an_intermediate_chunk_says_nothing_but_its_prompt_logprobs() -> None:
    live = live_of(submit(1, [1, 2]), submit(2, [3, 4]))
    part = PromptLogprobs(1, [TokenLogprobs(2, -0.5, [], [])])
    commit = commit_result(np.array([1, 2], np.int32), result_of([-1, -1], prompt_logprobs={1: part}), live)
    assert [(o.handle, o.prompt_logprobs, o.token_ids) for o in commit.outputs] == [(2, part, [])]
    assert not commit.finished and not commit.failed.any()


def test_a_row_whose_request_ended_is_dropped() -> None:
    commit = commit_result(np.array([5], np.int32), result_of([9]), {})
    assert commit.outputs == [] and commit.tokens.tolist() == [9]


def test_logprobs_go_to_those_who_asked_and_no_more_than_asked() -> None:
    live = live_of(
        submit(1, [1], sampling=SamplingParameters(logprobs=1)),
        submit(2, [1]),
        submit(3, [1], sampling=SamplingParameters(logprobs=0)),
    )
    result = result_of(
        [7, 8, 9],
        logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        top_ids=np.array([[7, 6], [8, 6], [9, 6]], np.int32),
        top_logprobs=np.array([[-1.0, -4.0], [-2.0, -4.0], [-3.0, -4.0]], np.float32),
    )
    first, second, third = commit_result(np.array([1, 2, 3], np.int32), result, live).outputs
    assert first.logprobs == [TokenLogprobs(7, -1.0, [7], [-1.0])]
    assert second.logprobs == []
    assert third.logprobs == [TokenLogprobs(9, -3.0, [], [])]


def test_the_model_length_ends_a_request_before_its_own_limit() -> None:
    live = {1: LiveRequest.of(submit(1, list(range(99)), 50), 100)}
    commit = commit_result(np.array([1], np.int32), result_of([4]), live)
    assert commit.outputs[0].finish_reason == "length"
    assert commit.finished == [1]


def test_nan_and_failure_end_rows_with_different_codes() -> None:
    live = live_of(submit(1, [1]), submit(2, [1]))
    handles = np.array([1, 2], np.int32)
    commit = commit_result(handles, result_of([-1, 3], nan=[True, False]), live)
    assert commit.failed.tolist() == [1, 0] and commit.nan_rows == 1 and commit.aborted == [1]
    failure = commit_failure(handles, RuntimeError("no memory"), live)
    assert failure.failed.tolist() == [1, 1] and failure.tokens.tolist() == [-1, -1]
    assert {o.error_code for o in failure.outputs} == {"step_failed"}
    assert all("no memory" in o.error for o in failure.outputs)


def test_a_mean_is_summed_over_chunks_and_sent_with_the_last() -> None:
    live = live_of(submit(1, [4, 5, 6], 1, pooling="mean"), submit(2, [7], 1, pooling="last"), submit(3, [8]))
    handles = np.array([1, 2, 3], np.int32)
    first = result_of([-1, 0, 9], pooled={0: vector(1.0, 2.0), 1: vector(8.0, 9.0)})
    commit = commit_result(handles, first, live)
    assert [(o.handle, o.token_ids, o.finish_reason) for o in commit.outputs] == [(2, [], "stop"), (3, [9], None)]
    assert np.frombuffer(commit.outputs[0].embedding, "<f4").tolist() == [8.0, 9.0] and commit.finished == [2]
    commit = commit_result(handles[:1], result_of([0], pooled={0: vector(5.0, 1.0)}), live)
    assert np.frombuffer(commit.outputs[0].embedding, "<f4").tolist() == [2.0, 1.0] and commit.finished == [1]
    assert live[1].output == [], "what the scheduler takes for a token is none"


def test_hidden_states_that_are_no_numbers_end_a_pooled_row() -> None:
    live = live_of(submit(1, [4, 5, 6], 1, pooling="mean"))
    commit = commit_result(np.array([1], np.int32), result_of([-1], nan=[True]), live)
    assert (commit.aborted, commit.failed.tolist(), commit.nan_rows) == ([1], [1], 1)
    assert "hidden states" in commit.outputs[0].error and commit.outputs[0].error_code == "nan_logits"


def vector(*elements: float) -> np.ndarray:
    return np.array(elements, np.float32)


def test_a_constraint_that_is_fulfilled_ends_its_request() -> None:
    live = live_of(submit(1, [1], stop_token_ids=(7,)), submit(2, [1]), submit(3, [1], 1))
    result = result_of([7, 8, 9], complete=frozenset((0, 1, 2)))
    commit = commit_result(np.array([1, 2, 3], np.int32), result, live)
    assert [(o.finish_reason, o.stop_token_id) for o in commit.outputs] == [("stop", 7), ("stop", -1), ("stop", -1)]
    assert [o.token_ids for o in commit.outputs] == [[7], [8], [9]]
    assert commit.finished == [1, 2, 3] and not commit.failed.any()


def test_a_constraint_at_a_dead_end_is_its_own_requests_error() -> None:
    live = live_of(submit(1, [1]), submit(2, [1]))
    result = result_of([-1, 8, -1], refused={0: "no token is left", 2: "no token is left"})
    commit = commit_result(np.array([1, 2, 3], np.int32), result, live)
    first, second = commit.outputs
    assert (first.finish_reason, first.error_code, first.error) == ("error", "constraint_failed", "no token is left")
    assert second.token_ids == [8] and second.finish_reason is None
    assert commit.aborted == [1] and commit.failed.tolist() == [1, 0, 1], "the last one's request is gone"
