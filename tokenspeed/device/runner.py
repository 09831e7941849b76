"""Executes plans, one after another, on the forward thread. Only this object touches arena, tables and model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.attention.backend import AttentionBackend, ForwardMode
from tokenspeed.device.block_tables import BlockTables
from tokenspeed.device.cache_arena import CacheArena
from tokenspeed.device.cache_operations import CacheOperations, StepCopies
from tokenspeed.device.forward_thread import Launched
from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.device.graphs.pieces import CapturedPrefill
from tokenspeed.device.handle import RowStart, StepResult
from tokenspeed.device.launched import Batch, LaunchedStep, PromptPart
from tokenspeed.device.placement import Landing, Placement
from tokenspeed.device.pooling import Pooler
from tokenspeed.device.sampling.sampler import Draw, Logprobs, Sampler
from tokenspeed.device.step_inputs import Step, StepInputs
from tokenspeed.layers.batch import Attention, ForwardBatch
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
        self._table_tensors = {tables.group_id: tables.tensor for tables in parts.tables}

    def execute(self, plan: "Plan", starts: Sequence[RowStart], submitted: float) -> StepResult:
        """Launches ``plan`` and finishes it at once."""
        return self.launch(plan, starts, submitted, overlapped=False).finish()

    def must_follow(self, plan: "Plan", starts: Sequence[RowStart], before: Launched) -> bool:
        """Whether ``plan`` may be launched only once ``before`` is finished: the mask of a row under a constraint is
        filled on the host, from the token that the row drew before, and all masks go to the device as one piece, which
        is not to be written while it does."""
        if not before.is_constrained:
            return False
        return any(start.grammar is not None for start in starts) or self._parts.sampler.constrains(
            plan.row[plan.samples != 0]
        )

    def launch(self, plan: "Plan", starts: Sequence[RowStart], submitted: float, *, overlapped: bool) -> LaunchedStep:
        """Queues all of ``plan``'s work on the device, and waits for none of it; ``submitted`` is when the plan was
        queued (time.perf_counter), ``overlapped`` whether the step before is unfinished.

        The order is the proof that a block may be reused within a round: image saves and write-backs, zero, copies,
        restores and load-backs, batch. Raises BlockTableMismatch for tables that no longer agree, and whatever the
        forward raises; a copy to or from the host that fails is the outcome of its operation and nothing else.
        """
        began = time.perf_counter()
        copies = self._operations.save(plan.operations)
        try:
            self._change_cache(plan, starts, copies)
            if plan.num_rows:
                with torch.inference_mode(), one_forward():
                    batch, prepared, forwarded = self._batch(plan)
            else:
                batch, prepared = Batch(), time.perf_counter()
                forwarded = prepared
        except BaseException:
            self._operations.end(copies)
            raise
        return LaunchedStep(
            forward_id=plan.forward_id,
            batch=batch,
            sampler=self._parts.sampler,
            operations=self._operations,
            copies=copies,
            times=(submitted, began, prepared, forwarded, time.perf_counter()),
            overlapped=overlapped,
        )

    def _change_cache(self, plan: "Plan", starts: Sequence[RowStart], copies: StepCopies) -> None:
        """Tables and blocks as ``plan`` has them, and the rows that begin."""
        parts = self._parts
        for start in starts:
            for tables in parts.tables:
                tables.begin(start.row)
        for group, tables in enumerate(parts.tables):
            tables.apply(plan.tables[group])
            parts.arena.zero(group, plan.zero_blocks[group])
            parts.arena.copy(group, plan.copy_blocks[group])
        self._operations.load(copies)
        for start in starts:
            parts.sampler.begin(start)
            self._pooler.begin(start)
            if start.output.size:
                parts.inputs.tell(start.row, int(start.output[-1]))

    def _batch(self, plan: "Plan") -> tuple[Batch, float, float]:
        """What the rows bring, on its way, and when they were prepared and the forward was queued."""
        parts, landing = self._parts, Landing(self._parts.placement)
        step, ends, draw = self._prepare(plan)
        parts.inputs.upload(step)
        self._refresh_attention(step)
        prepared = time.perf_counter()
        hidden = self._forward(step)
        forwarded = time.perf_counter()
        # From here on nothing is read on the host: the device goes through all of it without a pause.
        vectors = self._pooler.pool(hidden, step, ends, landing)
        if draw is not None:
            self._draw(hidden, step, draw, landing)
        prompts = self._prompt_logprobs(hidden, step, landing)
        batch = Batch(
            rows=step.rows.shape[0],
            sampling=step.sampling,
            draw=draw,
            vectors=vectors,
            ends=ends,
            prompts=prompts,
            landing=landing,
        )
        return batch, prepared, forwarded

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

    def _draw(self, hidden: torch.Tensor, step: Step, draw: Draw, landing: Landing) -> None:
        """Draws a token for each sampling row; logits are computed for these rows only."""
        parts, into, outcome = self._parts, step.drawing, draw.outcome
        parts.sampler.draw(draw, parts.model.logits(hidden, into.last_token.tensor), landing)
        parts.inputs.remember(into.rows.tensor, outcome.tokens, outcome.nan)

    def _prompt_logprobs(self, hidden: torch.Tensor, step: Step, landing: Landing) -> dict[int, PromptPart]:
        """Log-probabilities of the prompt tokens that this step's prompt positions predict, by row of the step."""
        found: dict[int, PromptPart] = {}
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
                found[place] = PromptPart(first + 1, self._sliced_logprobs(hidden, begin, targets, k, landing))
        return found

    def _sliced_logprobs(
        self, hidden: torch.Tensor, begin: int, targets: NDArray[np.int32], k: int, landing: Landing
    ) -> list[tuple[NDArray[np.int32], Logprobs]]:
        """Row ``begin + i`` of ``hidden`` predicts token i of ``targets``; logits exist for one slice at a time."""
        parts, slices = self._parts, []
        for start in range(0, targets.size, parts.max_logit_rows):
            piece = targets[start : start + parts.max_logit_rows]
            rows = torch.arange(begin + start, begin + start + piece.size, device=hidden.device)
            logits = parts.model.logits(hidden, rows)
            slices.append((piece, parts.sampler.prompt_logprobs(logits, piece, k, landing)))
        return slices
