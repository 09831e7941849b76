"""Executes plans, one after another, on the forward thread. Only this object touches arena, tables and model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.attention.backend import AttentionBackend, ForwardMode
from tokenspeed.device.block_tables import BlockTables
from tokenspeed.device.cache_arena import CacheArena
from tokenspeed.device.cache_operations import CacheOperations
from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.device.graphs.pieces import CapturedPrefill
from tokenspeed.device.handle import RowStart, StepResult, StepTimings
from tokenspeed.device.placement import Landing, Placement
from tokenspeed.device.pooling import Pooled, Pooler, pooled
from tokenspeed.device.sampling.sampler import Draw, Logprobs, Sampled, Sampler
from tokenspeed.device.step_inputs import Step, StepInputs
from tokenspeed.layers.batch import Attention, ForwardBatch
from tokenspeed.messages import PromptLogprobs
from tokenspeed.messages.output import TokenLogprobs
from tokenspeed.models import Model
from tokenspeed_kernel.steps import one_forward

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """What the builder made for the runner.

    ``decode`` is the model's forward for steps in which every row decodes, ``prefill`` for all others.
    ``max_logit_rows`` bounds one call of ``model.logits``.
    """

    placement: Placement
    model: Model
    decode: CapturedDecode
    prefill: CapturedPrefill
    arena: CacheArena
    tables: list[BlockTables]
    inputs: StepInputs
    attention: tuple[AttentionBackend, ...]
    sampler: Sampler
    max_logit_rows: int


class Runner:
    """One forward a plan, for prefilling and decoding rows together."""

    def __init__(self, parts: RunnerParts, operations: CacheOperations) -> None:
        self._parts = parts
        self._operations = operations
        self._pooler = Pooler()
        self._landing = Landing(parts.placement)
        self._table_tensors = {tables.group_id: tables.tensor for tables in parts.tables}

    def execute(self, plan: "Plan", starts: Sequence[RowStart], submitted: float) -> StepResult:
        """Runs ``plan``; ``submitted`` is when it was queued (time.perf_counter).

        The order is the proof that a block may be reused within a round: image saves and write-backs, zero, copies,
        restores and load-backs, batch. Raises BlockTableMismatch for tables that no longer agree, and whatever the
        forward raises; a copy to or from the host that fails is the outcome of its operation and nothing else.
        """
        began = time.perf_counter()
        parts = self._parts
        operations = plan.operations
        outcomes = self._operations.save(operations)
        for start in starts:
            for tables in parts.tables:
                tables.begin(start.row)
        for group, tables in enumerate(parts.tables):
            tables.apply(plan.tables[group])
            parts.arena.zero(group, plan.zero_blocks[group])
            parts.arena.copy(group, plan.copy_blocks[group])
        outcomes += self._operations.load(operations)
        for start in starts:
            parts.sampler.begin(start)
            self._pooler.begin(start)
            if start.output.size:
                parts.inputs.tell(start.row, int(start.output[-1]))
        try:
            if plan.num_rows == 0:
                result = _empty_result(plan.forward_id, queued=began - submitted, prepare=time.perf_counter() - began)
            else:
                with torch.inference_mode(), one_forward():
                    result = self._batch(plan, submitted, began)
        finally:
            self._operations.wait()
        return replace(result, operations=self._operations.agreed(operations, outcomes)) if outcomes else result

    def _batch(self, plan: "Plan", submitted: float, began: float) -> StepResult:
        parts, landing = self._parts, self._landing
        step, ends, draw = self._prepare(plan)
        parts.inputs.upload(step)
        self._refresh_attention(step)
        prepared = time.perf_counter()
        hidden = self._forward(step)
        forwarded = time.perf_counter()
        # From here to the wait nothing is read on the host: the device goes through all of it without a pause.
        vectors = self._pooler.pool(hidden, step, ends, landing)
        if draw is not None:
            self._draw(hidden, step, draw)
        prompts = self._prompt_logprobs(hidden, step)
        landing.wait()
        sampled = None if draw is None else parts.sampler.finish(draw)
        timings = StepTimings(
            queued=began - submitted,
            prepare=prepared - began,
            forward=forwarded - prepared,
            sample=time.perf_counter() - forwarded,
        )
        found = {place: prompt.found() for place, prompt in prompts.items()}
        result = _result(plan.forward_id, step, sampled, found, timings)
        return _with_pooled(result, pooled(vectors, ends)) if ends or vectors else result

    def _prepare(self, plan: "Plan") -> tuple[Step, list[int], Draw | None]:
        """On the host: the step, the rows whose pooled prompt ends with it, and the draw where a row draws a token."""
        parts = self._parts
        sampling = np.flatnonzero(plan.samples)
        ends = self._pooler.ends(plan, sampling)
        if ends:
            sampling = np.setdiff1d(sampling, ends)
        step = parts.inputs.build(plan, sampling, self._padded)
        if sampling.size == 0:
            return step, ends, None
        into, rows = step.drawing, step.rows[sampling]
        into.rows.host[:] = rows
        into.last_token.host[:] = step.last_token[sampling]
        into.positions.host[:] = step.prefix_len[sampling] + step.input_len[sampling]
        return step, ends, parts.sampler.prepare(rows, into)

    def _padded(self, tokens: int, num_extends: int) -> int:
        """See Padded: the next captured size."""
        parts = self._parts
        return parts.prefill.tokens_for(tokens) if num_extends else parts.decode.rows_for(tokens)

    def _forward(self, step: Step) -> torch.Tensor:
        """The hidden states of the step's tokens, and of what pads it."""
        parts = self._parts
        if step.num_extends == 0:
            return parts.decode(self._batch_of(step), step.prefix_len)
        return parts.prefill(self._batch_of(step.of_own()), self._batch_of(step))

    def _batch_of(self, step: Step) -> ForwardBatch:
        return ForwardBatch(
            input_ids=step.input_ids,
            positions=step.positions,
            slots=step.slots,
            attention=cast("tuple[Attention, ...]", self._parts.attention),
        )

    def _refresh_attention(self, step: Step) -> None:
        """Prepares the attention of each group for the extending rows [0, n) and the decoding rows [n, B). Where all
        decode, padding behind them is rows too."""
        n, count = step.num_extends, step.rows.shape[0]
        replays = n == 0 and self._parts.decode.replays(step.input_ids.shape[0])
        mode = ForwardMode.DECODE if n == 0 else ForwardMode.EXTEND if n == count else ForwardMode.MIXED
        lengths, prefixes = step.input_len_tensor[:n], step.prefix_len_tensor[:n]
        lengths_host, prefixes_host = lengths, prefixes
        if not self._parts.placement.is_host:
            lengths_host, prefixes_host = step.input_len_host[:n], step.prefix_len_host[:n]
        for attention in self._parts.attention:
            attention.refresh_extend_metadata(
                n,
                step.rows_tensor[:n],
                forward_mode=mode,
                block_tables=self._table_tensors,
                extend_seq_lens=lengths,
                extend_seq_lens_cpu=lengths_host,
                extend_prefix_lens=prefixes,
                extend_prefix_lens_cpu=prefixes_host,
                extend_with_prefix=bool(step.prefix_len[:n].any()),
                query_shard=None,
            )
            attention.refresh_decode_metadata(
                step.input_ids.shape[0] if n == 0 else count - n,
                count - n,
                step.rows_tensor[n:],
                step.seq_lens[n:],
                forward_mode=mode,
                block_tables=self._table_tensors,
                for_graph_replay=replays,
            )

    def _draw(self, hidden: torch.Tensor, step: Step, draw: Draw) -> None:
        """Draws a token for each sampling row; logits are computed for these rows only."""
        parts, into, outcome = self._parts, step.drawing, draw.outcome
        parts.sampler.draw(draw, parts.model.logits(hidden, into.last_token.tensor), self._landing)
        parts.inputs.remember(into.rows.tensor, outcome.tokens, outcome.nan)

    def _prompt_logprobs(self, hidden: torch.Tensor, step: Step) -> dict[int, "_PromptPart"]:
        """Log-probabilities of the prompt tokens that this step's prompt positions predict, by row of the step."""
        found: dict[int, _PromptPart] = {}
        for place in range(step.num_extends):
            request = self._parts.sampler.prompt_request(int(step.rows[place]))
            if request is None:
                continue
            prompt, k = request
            # The token at position p is predicted by position p - 1; the last prompt token predicts none of the prompt.
            first, length = int(step.prefix_len[place]), int(step.input_len[place])
            targets = prompt[first + 1 : first + length + 1]
            begin = int(step.last_token[place]) - length + 1
            if targets.size:
                found[place] = _PromptPart(first + 1, self._sliced_logprobs(hidden, begin, targets, k))
        return found

    def _sliced_logprobs(
        self, hidden: torch.Tensor, begin: int, targets: NDArray[np.int32], k: int
    ) -> list[tuple[NDArray[np.int32], Logprobs]]:
        """Row ``begin + i`` of ``hidden`` predicts token i of ``targets``; logits exist for one slice at a time."""
        parts, slices = self._parts, []
        for start in range(0, targets.size, parts.max_logit_rows):
            piece = targets[start : start + parts.max_logit_rows]
            rows = torch.arange(begin + start, begin + start + piece.size, device=hidden.device)
            logits = parts.model.logits(hidden, rows)
            slices.append((piece, parts.sampler.prompt_logprobs(logits, piece, k, self._landing)))
        return slices


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """The log-probabilities of a row's prompt tokens from index ``start`` on, slice by slice, on their way."""

    start: int
    slices: list[tuple[NDArray[np.int32], Logprobs]]

    def found(self) -> PromptLogprobs:
        """The same once they have landed."""
        return PromptLogprobs(self.start, [token for part in self.slices for token in _token_logprobs(*part)])


def _token_logprobs(tokens: NDArray[np.int32], taken: Logprobs) -> list[TokenLogprobs]:
    columns = (tokens.tolist(), taken.logprobs.tolist(), taken.top_ids.tolist(), taken.top_logprobs.tolist())
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]


def _result(
    forward_id: int,
    step: Step,
    sampled: Sampled | None,
    prompt_logprobs: dict[int, PromptLogprobs],
    timings: StepTimings,
) -> StepResult:
    """Spreads what the sampling rows gave over all rows of the plan. All arrays are copies."""
    count = step.rows.shape[0]
    tokens, nan = np.full(count, -1, np.int32), np.zeros(count, np.bool_)
    if sampled is None:
        return StepResult(
            forward_id=forward_id, tokens=tokens, nan=nan, prompt_logprobs=prompt_logprobs, timings=timings
        )
    tokens[step.sampling], nan[step.sampling] = sampled.tokens, sampled.nan
    result = StepResult(
        forward_id=forward_id,
        tokens=tokens,
        nan=nan,
        prompt_logprobs=prompt_logprobs,
        complete=frozenset(step.sampling[sampled.complete].tolist()) if sampled.complete else frozenset(),
        refused={int(step.sampling[place]): text for place, text in sampled.refused.items()},
        timings=timings,
    )
    return result if sampled.logprobs is None else _with_logprobs(result, step, sampled.logprobs)


def _with_logprobs(result: StepResult, step: Step, logprobs: Logprobs) -> StepResult:
    count = step.rows.shape[0]
    k = logprobs.top_ids.shape[1]
    spread, top_ids = np.full(count, np.nan, np.float32), np.full((count, k), -1, np.int32)
    top_logprobs = np.full((count, k), np.nan, np.float32)
    spread[step.sampling], top_ids[step.sampling] = logprobs.logprobs, logprobs.top_ids
    top_logprobs[step.sampling] = logprobs.top_logprobs
    return replace(result, logprobs=spread, top_ids=top_ids, top_logprobs=top_logprobs)


def _with_pooled(result: StepResult, found: Pooled) -> StepResult:
    result.tokens[found.ends] = 0
    result.tokens[found.broken], result.nan[found.broken] = -1, True
    return replace(result, pooled=found.vectors)


def _empty_result(forward_id: int, *, queued: float, prepare: float) -> StepResult:
    return StepResult(
        forward_id=forward_id,
        tokens=np.zeros(0, np.int32),
        nan=np.zeros(0, np.bool_),
        timings=StepTimings(queued=queued, prepare=prepare, forward=0.0, sample=0.0),
    )
