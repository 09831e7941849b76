"""Decode forwards that are recorded once and made again with one call: what a graph is to a device.

The plain forward is the twin, and serves every step that is not of a recorded size. Nothing but the interpreter's part
differs: the kernels, their arguments and their order are the same.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed.layers.batch import ForwardBatch
from tokenspeed_kernel.recording import Recorder, RecordingError, Replay

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Recorded:
    batch: ForwardBatch
    hidden: torch.Tensor
    replay: Replay


class RecordedForwards:
    """``forward`` for decoding rows, one token each, recorded at the first step of each number of rows.

    Args:
        forward: the model's forward; its buffers, and for each number of rows the batch's tensors, keep their
            addresses.
        recorder: notes its kernels' calls; or the reason why none can, for the log.
        max_rows: larger steps are not recorded; 0 records none.
    """

    def __init__(self, forward: Forward, recorder: Recorder | str, *, max_rows: int) -> None:
        self._forward = forward
        self._recorder: Recorder | None = None
        self._max_rows = max_rows
        self._recorded: dict[int, _Recorded] = {}
        if isinstance(recorder, str):
            logger.info("decode steps are not recorded: %s", recorder)
        elif max_rows:
            self._recorder = recorder

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows recorded so far."""
        return sorted(self._recorded)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The forward of ``batch``, whose rows all decode; the result is overwritten by the next forward."""
        rows = batch.input_ids.shape[0]
        found = self._recorded.get(rows)
        if found is not None:
            if not _same_memory(found.batch, batch):
                return self._forward(batch)
            found.replay()
            return found.hidden
        recorder = self._recorder
        if recorder is None or rows > self._max_rows:
            return self._forward(batch)
        try:
            hidden, replay = recorder(lambda: self._forward(batch))
        except RecordingError as error:
            logger.warning("decode steps are not recorded: %s", error)
            self._recorder = None
            return self._forward(batch)
        self._recorded[rows] = _Recorded(batch, hidden, replay)
        return hidden


def _same_memory(recorded: ForwardBatch, batch: ForwardBatch) -> bool:
    """Whether both batches are the same views: those of a size that recurs are made once and kept."""
    return (
        recorded.input_ids is batch.input_ids
        and recorded.positions is batch.positions
        and recorded.attention is batch.attention
        and all(old is new for old, new in zip(recorded.slots, batch.slots, strict=True))
    )
