"""The recorder of a kernel package (the native CPU kernels have one) as a graph provider."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.graphs.provider import Graph, GraphCaptureError
from tokenspeed_kernel.recording import Recorder, RecordingError, Replay

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class NativeGraph:
    """One native call that makes all noted ones again."""

    make: Replay

    def replay(self, before: NDArray[np.int32], rows: int) -> None:  # noqa: ARG002 - the protocol has it
        self.make()


class NativeGraphs:
    """Notes kernel calls as they run, which takes no time: every size is recorded when it first comes up."""

    name = "recorder"
    as_it_runs = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def warm_up(self, body: Callable[[], object]) -> None:
        """Nothing has to have run before."""

    def capture(self, body: Callable[[], _Result]) -> tuple[_Result, Graph]:
        """See GraphProvider; the result is valid at once."""
        try:
            result, replay = self._recorder(body)
        except RecordingError as error:
            raise GraphCaptureError(str(error)) from error
        return result, NativeGraph(replay)

    def synchronize(self) -> None:
        """Its calls return when their work is done."""
