"""Graphs of NVIDIA and AMD GPUs by torch.cuda.CUDAGraph, the same code on both (ROCm's torch has it by that name).

Never run on hardware yet: proved against torch's own signatures and a stand-in that keeps its rules
(tests/device/test_device_graphs.py).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.graphs.provider import Graph
from tokenspeed.device.graphs.stream_graphs import ERROR_MODE, StreamGraphs


@dataclass(frozen=True, slots=True)
class GpuGraph:
    """A torch.cuda.CUDAGraph, whose kernels read the lengths in device memory."""

    graph: Any

    def replay(self, before: NDArray[np.int32], rows: int) -> None:  # noqa: ARG002 - the protocol has it
        self.graph.replay()


class GpuGraphs(StreamGraphs):
    """See StreamGraphs. ``cuda``: the module torch.cuda, or what stands in for it."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.name = "HIP graphs" if torch.version.hip else "CUDA graphs"
        super().__init__(cuda)

    def _new(self) -> tuple[Any, Any]:
        graph = self._module.CUDAGraph()
        context = self._module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=ERROR_MODE)
        return graph, context

    def _wrap(self, graph: Any) -> Graph:
        return GpuGraph(graph)
