"""A step whose work is all queued on the device, and its result once that has come to the host."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.cache_operations import CacheOperations, StepCopies
from tokenspeed.device.handle import StepResult, StepTimings
from tokenspeed.device.placement import Landing
from tokenspeed.device.pooling import Pooled, pooled
from tokenspeed.device.sampling.sampler import Draw, Logprobs, Sampled, Sampler
from tokenspeed.messages import PromptLogprobs
from tokenspeed.messages.output import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The log-probabilities of a row's prompt tokens from index ``start`` on, slice by slice, on their way."""

    start: int
    slices: list[tuple[NDArray[np.int32], Logprobs]]

    def found(self) -> PromptLogprobs:
        """The same once they have landed."""
        return PromptLogprobs(self.start, [token for part in self.slices for token in _token_logprobs(*part)])


def _token_logprobs(tokens: NDArray[np.int32], taken: Logprobs) -> list[TokenLogprobs]:
    columns = (tokens.tolist(), taken.logprobs.tolist(), taken.top_ids.tolist(), taken.top_logprobs.tolist())
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a plan's rows bring, B of them, on its way.

    Nothing of it is a view of the step's inputs, which the next step may have overwritten by the time it lands.

    Attributes:
        rows: B.
        sampling: which of them draw a token, S of them.
        draw: theirs; None where there are none.
        vectors: what is pooled, by row; float32 [H] each.
        ends: the rows whose pooled prompt ends with the step.
        prompts: log-probabilities of prompts, by row.
        landing: has all of that once it was waited for.
    """

    rows: int = 0
    sampling: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    draw: Draw | None = None
    vectors: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    prompts: dict[int, PromptPart] = field(default_factory=dict)
    landing: Landing | None = None


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """See Launched.

    Attributes:
        forward_id: the plan's.
        times: by time.perf_counter, when the plan was submitted, its launch began, its inputs were prepared, its
            forward was queued, and all of it was.
        overlapped: see StepTimings.
    """

    forward_id: int
    batch: Batch
    sampler: Sampler
    operations: CacheOperations
    copies: StepCopies
    times: tuple[float, float, float, float, float]
    overlapped: bool

    @property
    def may_wait(self) -> bool:
        """See Launched. What ranks agree on while they finish a step comes at the same place among their exchanges: no
        rank may be launching meanwhile."""
        return not self.operations.exchanges(self.copies)

    @property
    def is_constrained(self) -> bool:
        """See Launched."""
        return self.batch.draw is not None and bool(self.batch.draw.constrained)

    def finish(self) -> StepResult:
        """See Launched. Raises what the device has to say of this step's work."""
        try:
            result = self._landed()
        finally:
            self.operations.end(self.copies)
        outcomes = self.operations.agreed(self.copies)
        return replace(result, operations=outcomes) if outcomes else result

    def _landed(self) -> StepResult:
        batch, began = self.batch, time.perf_counter()
        if batch.landing is not None:
            batch.landing.wait()
        sampled = None if batch.draw is None else self.sampler.finish(batch.draw)
        submitted, launching, prepared, forwarded, launched = self.times
        timings = StepTimings(
            queued=launching - submitted,
            prepare=prepared - launching,
            forward=forwarded - prepared,
            sample=launched - forwarded + time.perf_counter() - began,
            overlapped=self.overlapped,
        )
        found = {place: prompt.found() for place, prompt in batch.prompts.items()}
        result = _result(self.forward_id, batch, sampled, found, timings)
        return _with_pooled(result, pooled(batch.vectors, batch.ends)) if batch.ends or batch.vectors else result


def _result(
    forward_id: int,
    batch: Batch,
    sampled: Sampled | None,
    prompt_logprobs: dict[int, PromptLogprobs],
    timings: StepTimings,
) -> StepResult:
    """Spreads what the sampling rows gave over all rows of the plan. All arrays are copies."""
    sampling = batch.sampling
    tokens, nan = np.full(batch.rows, -1, np.int32), np.zeros(batch.rows, np.bool_)
    if sampled is None:
        return StepResult(
            forward_id=forward_id, tokens=tokens, nan=nan, prompt_logprobs=prompt_logprobs, timings=timings
        )
    tokens[sampling], nan[sampling] = sampled.tokens, sampled.nan
    result = StepResult(
        forward_id=forward_id,
        tokens=tokens,
        nan=nan,
        prompt_logprobs=prompt_logprobs,
        complete=_rows(sampling, sampled.complete),
        refused={int(sampling[place]): text for place, text in sampled.refused.items()},
        timings=timings,
    )
    return result if sampled.logprobs is None else _with_logprobs(result, sampling, sampled.logprobs)


def _rows(sampling: NDArray[np.intp], places: Sequence[int]) -> frozenset[int]:
    return frozenset(sampling[places].tolist()) if places else frozenset()


def _with_logprobs(result: StepResult, sampling: NDArray[np.intp], logprobs: Logprobs) -> StepResult:
    count, k = result.tokens.shape[0], logprobs.top_ids.shape[1]
    spread, top_ids = np.full(count, np.nan, np.float32), np.full((count, k), -1, np.int32)
    top_logprobs = np.full((count, k), np.nan, np.float32)
    spread[sampling], top_ids[sampling] = logprobs.logprobs, logprobs.top_ids
    top_logprobs[sampling] = logprobs.top_logprobs
    return replace(result, logprobs=spread, top_ids=top_ids, top_logprobs=top_logprobs)


def _with_pooled(result: StepResult, found: Pooled) -> StepResult:
    result.tokens[found.ends] = 0
    result.tokens[found.broken], result.nan[found.broken] = -1, True
    return replace(result, pooled=found.vectors)
