"""Graphs of Ascend NPUs (ACL graphs) by torch_npu's NPUGraph.

They differ from those of GPUs in one thing: fused attention takes the sequences' lengths as numbers of the host's,
which a capture would freeze. torch_npu notes such calls while it captures (``auto_dispatch_capture``), and a replay
waits at each of them until ``update`` gave it new lengths, and the tiling that follows from them.

Never run on hardware yet: proved against the signatures that torch_npu has and a stand-in that keeps its rules
(tests/device/test_device_graphs.py).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.graphs.provider import Graph
from tokenspeed.device.graphs.stream_graphs import ERROR_MODE, StreamGraphs

LENGTH_ARGUMENTS = ("actual_seq_lengths_kv", "actual_seq_kvlen")
"""What npu_fused_infer_attention_score and its second version call the lengths of the keys; a noted call that has no
argument of a name leaves it alone."""


@dataclass(frozen=True, slots=True)
class AscendGraph:
    """A torch.npu.NPUGraph and the module it belongs to."""

    graph: Any
    npu: Any

    def replay(self, before: NDArray[np.int32], rows: int) -> None:
        """Updates the lengths, then replays: the calls that wait for theirs find them there.

        The device must be done with the replay before, whose tasks are the ones that change.
        """
        if rows:
            lengths = [length + 1 for length in before.tolist()] + [0] * (rows - before.shape[0])
            self.npu.current_stream().synchronize()
            self.graph.update(cpu_update_input=[dict.fromkeys(LENGTH_ARGUMENTS, lengths)])
        self.graph.replay()


class AscendGraphs(StreamGraphs):
    """See StreamGraphs; the module is torch.npu, which torch_npu adds to torch, or what stands in for it."""

    name = "ACL graphs"

    def _new(self) -> tuple[Any, Any]:
        graph = self._module.NPUGraph()
        context = self._module.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            auto_dispatch_capture=True,
            capture_error_mode=ERROR_MODE,
        )
        return graph, context

    def _wrap(self, graph: Any) -> Graph:
        return AscendGraph(graph, self._module)
