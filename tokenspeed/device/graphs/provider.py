"""What captures a forward, whatever the device: the protocol that every kind of graph keeps.

A captured forward reads and writes the addresses that it was captured with, and every value of the host's (a number, a
branch, a grid) is as it was then. So whoever captures keeps all memory in place, and prepares each replay by writing
that memory.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

_Result = TypeVar("_Result")

NO_LENGTHS: NDArray[np.int32] = np.zeros(0, np.int32)
"""For the replay of what has no lengths."""


class GraphCaptureError(RuntimeError):
    """A forward that cannot be captured; the message names what stood in the way."""


class ReplayError(RuntimeError):
    """A replay that a check found to differ from its eager twin; the message says in what."""


class Graph(Protocol):
    """A captured forward."""

    def replay(self, before: NDArray[np.int32], rows: int) -> None:
        """Makes the captured work again, over the same memory, behind what the current stream was given before.

        ``before`` int32 [real rows]: the tokens before each row's own; ``rows``: how many were captured, those behind
        the real ones are padding. Only graphs that hold lengths of the host's look at them (Ascend); 0 rows where
        there are no lengths (a piece of a prefill).
        """
        ...


class GraphProvider(Protocol):
    """One device's graphs, all of one engine's.

    Attributes:
        name: for logs.
        as_it_runs: capturing costs nothing, so that each number of rows is captured when it first comes up, without
            padding; else a ladder of sizes is captured at the start.
    """

    @property
    def name(self) -> str: ...
    @property
    def as_it_runs(self) -> bool: ...

    def warm_up(self, body: Callable[[], object]) -> None:
        """Runs ``body`` as often as it must have run before it is captured: what compiles, allocates or opens a library
        at its first call must have done so."""
        ...

    def capture(self, body: Callable[[], _Result]) -> tuple[_Result, Graph]:
        """Runs ``body`` once while its work is captured; its result is valid after a replay, and here only where the
        provider runs what it captures (it need not: a GPU notes launches and makes none of them).

        Raises GraphCaptureError where ``body`` does work that a replay could not make again.
        """
        ...

    def synchronize(self) -> None:
        """Waits until all work given to the device is done, and raises what went wrong in it."""
        ...


@runtime_checkable
class PieceProvider(GraphProvider, Protocol):
    """One that can begin and end in the middle of a forward."""

    def begin(self) -> None:
        """Captures from here on."""
        ...

    def end(self) -> Graph:
        """Ends what ``begin`` began. Raises GraphCaptureError where it cannot be captured."""
        ...

    def abandon(self) -> None:
        """Ends it without a graph, after an error; nothing is raised."""
        ...


def capture_between(provider: PieceProvider, body: Callable[[], _Result]) -> tuple[_Result, Graph]:
    """``capture`` of a provider that begins and ends."""
    provider.begin()
    try:
        result = body()
    except BaseException:
        provider.abandon()
        raise
    return result, provider.end()
