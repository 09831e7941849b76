"""Decode forwards that are captured once a size and made again with one call.

The plain forward is the twin, and serves every step that no graph fits. Nothing but the interpreter's part differs: the
kernels, their arguments and their order are the same.

Logits and sampling stay outside. Which rows sample, and what is done to their logits (penalties, masks of a grammar,
log-probabilities), differs from step to step, so a graph would have to compute the widest case always; and they are
three launches among hundreds.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.graphs.check import ReplayCheck
from tokenspeed.device.graphs.provider import Graph, GraphProvider
from tokenspeed.device.graphs.steps import CapturedSteps, Forward, same_addresses
from tokenspeed.layers.batch import ForwardBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    batch: ForwardBatch
    hidden: torch.Tensor
    graph: Graph


class CapturedDecode(CapturedSteps[GraphProvider, _Captured]):
    """``forward`` for decoding rows, one token each, padded to the next captured size.

    Args:
        forward: the model's forward; its buffers, and for each number of rows the batch's tensors, keep their
            addresses.
        provider: captures it; or the reason why nothing can, for the log.
        sizes: the numbers of rows to capture, ascending. Of a provider that captures as it runs they are reached
            without padding.
        check: looks at every replay; None: nobody does.
    """

    kind, unit = "decode", "rows"

    def __init__(
        self, forward: Forward, provider: GraphProvider | str, *, sizes: Sequence[int], check: ReplayCheck | None = None
    ) -> None:
        if isinstance(provider, str):
            logger.info("decode steps are not captured: %s", provider)
        super().__init__(None if isinstance(provider, str) else provider, sizes)
        self._forward = forward
        self._check = check

    def rows_for(self, rows: int) -> int:
        """The rows that a decode of ``rows`` is to be prepared with."""
        return self._padded(rows)

    def replays(self, rows: int) -> bool:
        """Whether a decode prepared with ``rows`` rows is a replay."""
        return rows in self._captured

    def __call__(self, batch: ForwardBatch, before: NDArray[np.int32]) -> torch.Tensor:
        """The forward of ``batch``, whose rows all decode; the result is overwritten by the next forward.

        ``before`` int32 [real rows]: the tokens before each row's own.
        """
        rows = batch.input_ids.shape[0]
        found = self._captured.get(rows)
        if found is None:
            return self._capture(batch, rows, before) if self._takes and rows in self._wanted else self._forward(batch)
        if not (batch.attention is found.batch.attention and same_addresses(found.batch, batch)):
            return self._forward(batch)
        if self._check is None:
            found.graph.replay(before, rows)
        else:
            graph = found.graph
            self._check.replay(lambda: graph.replay(before, rows), found.hidden, lambda: self._forward(batch))
        return found.hidden

    def _capture(self, batch: ForwardBatch, rows: int, before: NDArray[np.int32]) -> torch.Tensor:
        def make(provider: GraphProvider) -> _Captured:
            provider.warm_up(lambda: self._forward(batch))
            captured = _Captured(batch, *provider.capture(lambda: self._forward(batch)))
            if not provider.as_it_runs:
                captured.graph.replay(before, rows)
                provider.synchronize()
            return captured

        kept = self._take(rows, make)
        return self._forward(batch) if kept is None else kept.hidden
