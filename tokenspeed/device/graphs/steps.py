"""What captured decodes and prefills share: which sizes are to be captured, which are, and when none more may be."""

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from tokenspeed.device.graphs.provider import GraphCaptureError, GraphProvider
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.recipes.capture_ladder import padded_size
from tokenspeed_kernel.serving_guard import process_guard

logger = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], torch.Tensor]

_Provider = TypeVar("_Provider", bound=GraphProvider)
_Kept = TypeVar("_Kept")


class CapturedSteps(Generic[_Provider, _Kept]):
    """The captured sizes of one kind of step.

    Args:
        provider: captures them; None: nothing does.
        sizes: rows or tokens to capture.
    """

    kind: ClassVar[str]
    """The step, for logs: "decode"."""
    unit: ClassVar[str]
    """What a size counts: "rows"."""

    def __init__(self, provider: _Provider | None, sizes: Sequence[int]) -> None:
        self._provider = provider if sizes else None
        self._wanted = frozenset(sizes)
        self._captured: dict[int, _Kept] = {}
        self._ladder: tuple[int, ...] = ()
        self._takes = self._provider is not None and self._provider.as_it_runs

    @property
    def sizes(self) -> list[int]:
        """The sizes captured so far."""
        return sorted(self._captured)

    @property
    def to_capture(self) -> list[int]:
        """What the start has to capture, the largest first: the memory pool is then as large as it gets, and smaller
        graphs find room in it."""
        provider = self._provider
        return [] if provider is None or provider.as_it_runs else sorted(self._wanted, reverse=True)

    def capturing(self, *, takes: bool) -> None:
        """From now on sizes that come up are captured, or no more are."""
        self._takes = takes and self._provider is not None

    def _padded(self, size: int) -> int:
        """The next captured size; ``size`` where there is none, or while it is just being captured."""
        if not self._ladder or self._takes:
            return size
        return padded_size(self._ladder, size) or size

    def _take(self, size: int, make: Callable[[_Provider], _Kept]) -> _Kept | None:
        """What ``make`` captures of a step of ``size``, kept; None where it cannot be captured, which is the end of
        capturing and said in the log. Raises ServingViolation where the process serves and may not."""
        provider = self._provider
        assert provider is not None, "nothing is taken without a provider"
        if not provider.as_it_runs:
            process_guard().check("capture", f"{self.kind} of {size} {self.unit}")
        try:
            kept = make(provider)
        except RuntimeError as error:
            # A device's own word for work that it cannot capture is a RuntimeError too, and what is wrong with the
            # forward itself comes up again in the plain one. What was captured as it ran must not run a second time.
            if provider.as_it_runs and not isinstance(error, GraphCaptureError):
                raise
            logger.warning("%s steps are not captured: %s", self.kind, error)
            self._takes, self._provider = False, None
            return None
        self._captured[size] = kept
        if not provider.as_it_runs:
            self._ladder = tuple(self.sizes)
        return kept


def same_addresses(captured: ForwardBatch, batch: ForwardBatch) -> bool:
    """Whether the inputs lie where the captured ones did."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
        (captured.input_ids, batch.input_ids),
        (captured.positions, batch.positions),
        *zip(captured.slots, batch.slots, strict=True),
    ]
    return all(old.data_ptr() == new.data_ptr() for old, new in pairs)
