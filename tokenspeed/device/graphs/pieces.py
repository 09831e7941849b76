"""A prefill as captured pieces between what runs eagerly; see docs/design/kda-prefill-subgraphs.md.

What a layer does to each token alone (projections, norms, experts) depends on the number of tokens only, and is
captured for a padded number. What depends on how the tokens belong to rows (attention over ragged lengths, a scan with
its plan of chunks) is what layers run by ``ForwardBatch.apart``: there a piece ends, the call runs on the step's own
tokens, and the next piece begins. The forward itself says where; no model has a second one.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from tokenspeed.device.graphs.check import ReplayCheck
from tokenspeed.device.graphs.provider import NO_LENGTHS, Graph, GraphCaptureError, GraphProvider, PieceProvider
from tokenspeed.device.graphs.steps import CapturedSteps, Forward, same_addresses
from tokenspeed.layers.batch import Attention, Body, ForwardBatch

logger = logging.getLogger(__name__)

Argument = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Break:
    """A call between two pieces, with tensors for the padded tokens."""

    body: Body
    arguments: tuple[Argument, ...]

    def run(self, batch: ForwardBatch) -> None:
        """Runs it on the tokens of ``batch``; what it writes of the padding is zero, which every later kernel takes."""
        tokens = batch.input_ids.shape[0]
        self.body(batch, *(_first(argument, tokens) for argument in self.arguments))
        written = self.arguments[-1]
        for tensor in [written] if isinstance(written, torch.Tensor) else written:
            if tensor.shape[0] > tokens:
                tensor[tokens:].zero_()


@dataclass(frozen=True, slots=True)
class Pieces:
    """A captured forward: piece, break, piece, …, piece; the last one leaves ``hidden``."""

    graphs: list[Graph]
    breaks: list[Break]
    hidden: torch.Tensor
    inputs: ForwardBatch

    def replay(self, batch: ForwardBatch) -> None:
        """Makes the forward of the tokens of ``batch``, whose inputs lie where the captured ones did, padded."""
        for graph, then in zip(self.graphs, self.breaks, strict=False):
            graph.replay(NO_LENGTHS, 0)
            then.run(batch)
        self.graphs[-1].replay(NO_LENGTHS, 0)


class _Sealed(Sequence[Attention]):
    """The attention of a batch that is captured in pieces: nobody may ask it outside of a break."""

    def __getitem__(self, index: object) -> NoReturn:
        raise GraphCaptureError(
            f"a layer asks the attention of group {index} in the middle of a piece; let it do so by ForwardBatch.apart"
        )

    def __len__(self) -> int:
        return 0


@dataclass(slots=True)
class _Recording:
    """What is captured so far of the forward of ``real``."""

    provider: PieceProvider
    real: ForwardBatch
    graphs: list[Graph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _PieceBatch(ForwardBatch):
    """The padded batch of a forward that is captured."""

    recording: _Recording

    def apart(self, body: Body, *arguments: Argument) -> None:
        recording = self.recording
        recording.graphs.append(recording.provider.end())
        recording.breaks.append(Break(body, arguments))
        recording.breaks[-1].run(recording.real)
        recording.provider.begin()


@dataclass(frozen=True, slots=True)
class _TwinBatch(ForwardBatch):
    """The padded batch of the eager twin: the same calls with the same shapes, and nothing is captured.

    The plain forward of the step's own tokens gives the same where kernels promise that a row does not depend on how
    many there are (``determinism`` takes such alone), else nearly so.
    """

    real: ForwardBatch

    def apart(self, body: Body, *arguments: Argument) -> None:
        Break(body, arguments).run(self.real)


class CapturedPrefill(CapturedSteps[PieceProvider, Pieces]):
    """The forward of steps with prefilling rows, in pieces where a captured number of tokens has room for it.

    Args:
        forward, provider, check: see CapturedDecode.
        sizes: the numbers of tokens to capture, ascending; none, and every step runs plainly.
    """

    kind, unit = "prefill", "tokens"

    def __init__(
        self, forward: Forward, provider: GraphProvider | str, *, sizes: Sequence[int], check: ReplayCheck | None = None
    ) -> None:
        pieces = provider if isinstance(provider, PieceProvider) else None
        if sizes and pieces is None:
            reason = provider if isinstance(provider, str) else f"the {provider.name} captures whole forwards alone"
            logger.info("prefill steps are not captured: %s", reason)
        super().__init__(pieces, sizes)
        self._forward = forward
        self._check = check

    def tokens_for(self, tokens: int) -> int:
        """The tokens that a step of ``tokens`` is to be prepared with."""
        return self._padded(tokens)

    def __call__(self, batch: ForwardBatch, padded: ForwardBatch) -> torch.Tensor:
        """The forward of ``batch``, float32 [T or more, H]; overwritten by the next. ``padded`` has the same inputs,
        and padding behind them up to ``tokens_for`` of them."""
        tokens = padded.input_ids.shape[0]
        found = self._captured.get(tokens)
        if found is None:
            takes = self._takes and tokens in self._wanted
            return self._capture(batch, padded) if takes else self._forward(batch)
        if not same_addresses(found.inputs, padded):
            return self._forward(batch)
        if self._check is None:
            found.replay(batch)
        else:
            twin = _TwinBatch(padded.input_ids, padded.positions, padded.slots, _Sealed(), batch)
            count = batch.input_ids.shape[0]
            self._check.replay(lambda: found.replay(batch), found.hidden, lambda: self._forward(twin), count)
        return found.hidden

    def _capture(self, batch: ForwardBatch, padded: ForwardBatch) -> torch.Tensor:
        def make(provider: PieceProvider) -> Pieces:
            provider.warm_up(lambda: self._forward(batch))
            pieces = _capture(self._forward, provider, batch, padded)
            pieces.replay(batch)
            provider.synchronize()
            return pieces

        kept = self._take(padded.input_ids.shape[0], make)
        return self._forward(batch) if kept is None else kept.hidden


def _capture(forward: Forward, provider: PieceProvider, batch: ForwardBatch, padded: ForwardBatch) -> Pieces:
    recording = _Recording(provider, batch)
    captured = _PieceBatch(padded.input_ids, padded.positions, padded.slots, _Sealed(), recording)
    provider.begin()
    try:
        hidden = forward(captured)
    except BaseException:
        provider.abandon()
        raise
    recording.graphs.append(provider.end())
    if not recording.breaks:
        raise GraphCaptureError("the model's layers name no part that runs apart, so all of a prefill would be frozen")
    return Pieces(recording.graphs, recording.breaks, hidden, padded)


def _first(argument: Argument, tokens: int) -> Argument:
    """The rows of ``argument`` that are of the first ``tokens`` tokens."""
    if isinstance(argument, torch.Tensor):
        return argument[:tokens]
    return tuple(tensor[:tokens] for tensor in argument)
