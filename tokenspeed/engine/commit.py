"""Turns the result of a step into what the frontend is told and what the scheduler is told.

Pure but for the output each live request gathers: no device, no scheduler, no socket.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import StepResult
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.messages import FinishReason, PromptLogprobs, RequestOutput, TokenLogprobs


@dataclass
class Commit:
    """What one result led to.

    Attributes:
        tokens: int32 [rows] for the scheduler, -1 where nothing was sampled or the row failed.
        failed: uint8 [rows], 1 where the row must publish nothing.
        outputs: for the frontend.
        finished: handles that ended by themselves.
        aborted: handles the engine ends because their row failed.
        nan_rows: rows whose logits held a NaN.
    """

    tokens: NDArray[np.int32]
    failed: NDArray[np.uint8]
    outputs: list[RequestOutput] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    nan_rows: int = 0


def commit_result(
    handles: NDArray[np.int32], result: StepResult, live: Mapping[int, LiveRequest], lost: Collection[int] = ()
) -> Commit:
    """Commits a step that succeeded. Rows of ``lost`` requests read blocks that a copy failed to bring; they fail.

    ``handles`` int32 [rows] are the plan's. A row whose request ended meanwhile (its last step was already out when
    the end was found) is dropped: its token was never asked for.
    """
    commit = Commit(tokens=result.tokens, failed=result.nan.astype(np.uint8))
    for index in result.refused:
        commit.failed[index] = 1
    if lost:
        commit.failed |= np.isin(handles, list(lost)).astype(np.uint8)
        commit.tokens = np.where(commit.failed, np.int32(-1), result.tokens)
    tokens = result.tokens.tolist()
    for index, handle in enumerate(handles.tolist()):
        request = live.get(handle)
        if request is None:
            continue
        failure = _failure_of(request, index, result, lost)
        if failure is not None:
            commit.nan_rows += failure.error_code == "nan_logits"
            commit.aborted.append(handle)
            commit.outputs.append(failure)
            continue
        if request.submit.pooling is not None:
            if index in result.pooled:
                request.pool(result.pooled[index])
            if tokens[index] >= 0:
                commit.finished.append(handle)
                commit.outputs.append(_embedded(request))
            continue
        prompt_logprobs = result.prompt_logprobs.get(index)
        if tokens[index] < 0:
            if prompt_logprobs is not None:
                commit.outputs.append(RequestOutput(handle=handle, prompt_logprobs=prompt_logprobs))
            continue
        commit.outputs.append(_sampled(request, index, tokens[index], result, prompt_logprobs, commit))
    return commit


def commit_failure(handles: NDArray[np.int32], cause: BaseException, live: Mapping[int, LiveRequest]) -> Commit:
    """Commits a step whose forward raised: its rows end with an error, everybody else goes on."""
    rows = len(handles)
    commit = Commit(tokens=np.full(rows, -1, dtype=np.int32), failed=np.ones(rows, dtype=np.uint8))
    for handle in handles.tolist():
        request = live.get(handle)
        if request is not None:
            commit.aborted.append(handle)
            commit.outputs.append(_failure(request, "step_failed", f"a step of the model failed: {cause}"))
    return commit


def _failure_of(request: LiveRequest, index: int, result: StepResult, lost: Collection[int]) -> RequestOutput | None:
    """Why the request whose row is ``index`` cannot go on, as the frontend is told; None where it can."""
    if request.submit.handle in lost:
        return _failure(request, "cache_load_failed", "blocks of its prefix could not be copied from the host pool")
    if result.nan[index]:
        what = "logits" if request.submit.pooling is None else "hidden states"
        return _failure(request, "nan_logits", f"the model's {what} were not numbers")
    if index in result.refused:
        return _failure(request, "constraint_failed", result.refused[index])
    return None


def _sampled(
    request: LiveRequest,
    index: int,
    token: int,
    result: StepResult,
    prompt_logprobs: PromptLogprobs | None,
    commit: Commit,
) -> RequestOutput:
    request.output.append(token)
    handle = request.submit.handle
    reason: FinishReason | None = None
    stop_token_id = -1
    if token in request.stop_token_ids:
        reason, stop_token_id = "stop", token
    elif index in result.complete:
        reason = "stop"
    elif len(request.output) >= request.limit:
        reason = "length"
    if reason is not None:
        commit.finished.append(handle)
    queue_s = _first_queue_s(request)
    return RequestOutput(
        handle=handle,
        token_ids=[token],
        logprobs=_token_logprobs(request, index, token, result),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=_first_cached(request),
        queue_s=queue_s,
        finish_reason=reason,
        stop_token_id=stop_token_id,
    )


def _embedded(request: LiveRequest) -> RequestOutput:
    queue_s = _first_queue_s(request)
    return RequestOutput(
        handle=request.submit.handle,
        embedding=request.embedding(),
        cached_tokens=_first_cached(request),
        queue_s=queue_s,
        finish_reason="stop",
    )


def _first_queue_s(request: LiveRequest) -> float:
    return -1.0 if request.reported_cached else request.queue_s


def _first_cached(request: LiveRequest) -> int:
    if request.reported_cached:
        return -1
    request.reported_cached = True
    return request.cached_tokens


def _token_logprobs(request: LiveRequest, index: int, token: int, result: StepResult) -> list[TokenLogprobs]:
    count = request.submit.sampling.logprobs
    if count < 0 or result.logprobs is None:
        return []
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    if count and result.top_ids is not None and result.top_logprobs is not None:
        top_ids = result.top_ids[index, :count].tolist()
        top_logprobs = result.top_logprobs[index, :count].tolist()
    return [TokenLogprobs(token, float(result.logprobs[index]), top_ids, top_logprobs)]


def _failure(request: LiveRequest, code: str, text: str) -> RequestOutput:
    return RequestOutput(
        handle=request.submit.handle,
        cached_tokens=_first_cached(request),
        finish_reason="error",
        error=text,
        error_code=code,
    )
