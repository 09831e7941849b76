"""The memory of a forward: float32 buffers by name, made once, seen as views for the tokens of a step."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from tokenspeed.layers.linear import StackedOutputs

_View = TypeVar("_View")


class Buffer(Generic[_View]):
    """One named piece of a workspace. Call it with a number of tokens for the view."""

    def __init__(self, make: Callable[[int], _View], kept: int) -> None:
        self._make = make
        self._kept = kept
        self._views: dict[int, _View] = {}

    def __call__(self, tokens: int) -> _View:
        """The view for ``tokens`` tokens; those of decode sizes are made once and keep their addresses."""
        found = self._views.get(tokens)
        if found is None:
            found = self._make(tokens)
            if tokens <= self._kept:
                self._views[tokens] = found
        return found


class Workspace:
    """Buffers that the layers share: whoever takes the same name gets the same memory, so what one layer leaves in it
    is gone when the next one runs.

    ``max_tokens`` bounds the tokens of a step, ``kept`` the sizes whose views are kept. The memory, on ``device``,
    comes with ``make`` or the first view; a name can grow until then.
    """

    def __init__(self, *, device: torch.device, max_tokens: int, kept: int) -> None:
        self._device = device
        self._max_tokens = max_tokens
        self._kept = kept
        self._widths: dict[str, int] = {}
        self._memory: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers asked for so far."""
        return 4 * self._max_tokens * sum(self._widths.values())

    def make(self) -> None:
        """Takes the memory of all buffers asked for so far."""
        for name in self._widths:
            self._flat(name)

    def rows(self, name: str, *shape: int) -> Buffer[torch.Tensor]:
        """float32 [T, *shape]."""
        width = self._take(name, torch.Size(shape).numel())
        return Buffer(lambda tokens: self._flat(name)[: tokens * width].view(tokens, *shape), self._kept)

    def stacked(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Buffer[StackedOutputs]:
        """What a StackedLinear fills; ``shapes`` is each part's shape for one token."""
        self._take(name, sum(torch.Size(shape).numel() for shape in shapes))
        return Buffer(lambda tokens: StackedOutputs.of(self._flat(name), tokens, shapes), self._kept)

    def integers(self, name: str, *shape: int) -> Buffer[torch.Tensor]:
        """int32 [T, *shape]."""
        width = self._take(name, torch.Size(shape).numel())
        return Buffer(
            lambda tokens: self._flat(name)[: tokens * width].view(torch.int32).view(tokens, *shape), self._kept
        )

    def _take(self, name: str, width: int) -> int:
        if name in self._memory and width > self._widths[name]:
            raise RuntimeError(f"workspace buffer {name!r} is in use with {self._widths[name]} elements a token")
        self._widths[name] = max(width, self._widths.get(name, 0))
        return width

    def _flat(self, name: str) -> torch.Tensor:
        if name not in self._memory:
            self._memory[name] = torch.zeros(self._max_tokens * self._widths[name], device=self._device)
        return self._memory[name]
