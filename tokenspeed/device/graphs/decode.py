"""Decode forwards that are captured once a size and made again with one call.

The plain forward is the twin, and serves every step that no graph fits. Nothing but the interpreter's part differs: the
kernels, their arguments and their order are the same.

Logits and sampling stay outside. Which rows sample, and what is done to their logits (penalties, masks of a grammar,
log-probabilities), differs from step to step, so a graph would have to compute the widest case always; and they are
three launches among hundreds.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.graphs.check import ReplayCheck
from tokenspeed.device.graphs.provider import Graph, GraphProvider
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.recipes.capture_ladder import padded_size
from tokenspeed_kernel.serving_guard import process_guard

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Captured:
    batch: ForwardBatch
    hidden: torch.Tensor
    graph: Graph


class CapturedDecode:
    """``forward`` for decoding rows, one token each, padded to the next captured size.

    Args:
        forward: the model's forward; its buffers, and for each number of rows the batch's tensors, keep their
            addresses.
        provider: captures it; or the reason why nothing can, for the log.
        sizes: the numbers of rows to capture, ascending. Of a provider that captures as it runs they are reached
            without padding.
        check: looks at every replay; None: nobody does.
    """

    def __init__(
        self, forward: Forward, provider: GraphProvider | str, *, sizes: Sequence[int], check: ReplayCheck | None = None
    ) -> None:
        self._forward = forward
        self._provider: GraphProvider | None = None
        self._wanted = frozenset(sizes)
        self._check = check
        self._captured: dict[int, _Captured] = {}
        self._ladder: tuple[int, ...] = ()
        self._takes = False
        if isinstance(provider, str):
            logger.info("decode steps are not captured: %s", provider)
        elif sizes:
            self._provider = provider
            self._takes = provider.as_it_runs

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows captured so far."""
        return sorted(self._captured)

    @property
    def to_capture(self) -> list[int]:
        """What the start has to capture, the largest first: the memory pool is then as large as it gets, and smaller
        graphs find room in it."""
        provider = self._provider
        return [] if provider is None or provider.as_it_runs else sorted(self._wanted, reverse=True)

    def capturing(self, *, takes: bool) -> None:
        """From now on sizes that come up are captured, or no more are."""
        self._takes = takes

    def rows_for(self, rows: int) -> int:
        """The rows that a decode of ``rows`` is to be prepared with: the next captured size, or as many where there is
        none or it is just being captured."""
        if not self._ladder or self._takes:
            return rows
        return padded_size(self._ladder, rows) or rows

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
        if self._check is not None:
            hidden = found.hidden
            self._check.replay(lambda: found.graph.replay(before, rows), hidden, lambda: self._forward(batch))
        else:
            found.graph.replay(before, rows)
        return found.hidden

    def _capture(self, batch: ForwardBatch, rows: int, before: NDArray[np.int32]) -> torch.Tensor:
        provider = self._provider
        assert provider is not None, "nothing is taken without a provider"
        if not provider.as_it_runs:
            process_guard().check("capture", f"decode of {rows} rows")
        try:
            provider.warm_up(lambda: self._forward(batch))
            hidden, graph = provider.capture(lambda: self._forward(batch))
        except RuntimeError as error:
            # A device's own word for work that cannot be captured is a RuntimeError too; what is wrong with the forward
            # itself comes up again below.
            logger.warning("decode steps are not captured: %s", error)
            self._takes, self._provider = False, None
            return self._forward(batch)
        self._captured[rows] = _Captured(batch, hidden, graph)
        if not provider.as_it_runs:
            self._ladder = tuple(self.sizes)
            graph.replay(before, rows)
            provider.synchronize()
        return hidden


def same_addresses(captured: ForwardBatch, batch: ForwardBatch) -> bool:
    """Whether the inputs lie where the captured ones did."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
        (captured.input_ids, batch.input_ids),
        (captured.positions, batch.positions),
        *zip(captured.slots, batch.slots, strict=True),
    ]
    return all(old.data_ptr() == new.data_ptr() for old, new in pairs)
