"""What graphs of devices with streams share: one memory pool, one side stream that all captures run on, warm runs."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from tokenspeed.device.graphs.check import CHECK_VARIABLE
from tokenspeed.device.graphs.provider import Graph, GraphCaptureError, capture_between

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

WARM_RUNS = 2
"""The first run compiles kernels and opens libraries (a workspace for each stream), the second takes from the allocator
what the first gave back: the captured one does neither."""

ERROR_MODE = "thread_local"
"""Only this thread's calls may break a capture: others (a copy to the host pool, a loader) go on."""


class StreamGraphs:
    """All graphs of one engine on one device.

    ``module``: torch.cuda or torch.npu, or what stands in for it. Graphs share one pool of memory and are replayed one
    at a time in any order: what one leaves in the pool is nobody else's input, for all that outlives a forward is in
    buffers made before.
    """

    name: str
    as_it_runs = False

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stream = module.Stream()
        self._pool = module.graph_pool_handle()
        self._open: tuple[Any, Any] | None = None
        logger.warning(
            "%s have never run on hardware; %s=1 compares each with the plain forward", self.name, CHECK_VARIABLE
        )

    def _new(self) -> tuple[Any, Any]:
        """A graph of the device's, and the context that captures it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its graphs are")

    def _wrap(self, graph: Any) -> Graph:
        """The captured graph as the protocol has it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its graphs are replayed")

    def warm_up(self, body: Callable[[], object]) -> None:
        """Runs on the stream of the captures, behind what the current stream has to do and before what it gets next."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            for _ in range(WARM_RUNS):
                body()
        self._module.current_stream().wait_stream(self._stream)
        self.synchronize()

    def capture(self, body: Callable[[], _Result]) -> tuple[_Result, Graph]:
        """See GraphProvider; the result holds nothing before the first replay."""
        return capture_between(self, body)

    def begin(self) -> None:
        """See PieceProvider. Entering waits for all work given to the device."""
        graph, context = self._new()
        context.__enter__()
        self._open = graph, context

    def end(self) -> Graph:
        """See PieceProvider."""
        assert self._open is not None, "begin comes first"
        (graph, context), self._open = self._open, None
        try:
            context.__exit__(None, None, None)
        except RuntimeError as error:
            raise GraphCaptureError(f"the device could not end a capture: {error}") from error
        return self._wrap(graph)

    def abandon(self) -> None:
        """See PieceProvider."""
        if self._open is None:
            return
        (graph, context), self._open = self._open, None
        # A capture that an error broke ends with another; the first one says what happened.
        with suppress(RuntimeError):
            context.__exit__(None, None, None)
        graph.reset()

    def synchronize(self) -> None:
        """See GraphProvider."""
        self._module.synchronize()
