"""Stand-ins for torch.cuda and torch.npu as far as graphs go, over work of the CPU.

Every call is bound to the signature of the real thing, so that a wrong keyword fails here: torch.cuda's is taken from
torch, which has the classes without a device; torch_npu's is written down as its source has it. The rules that a device
enforces are enforced: one capture at a time and on a side stream, graphs of one pool on one stream, no waiting inside a
capture, no replay before its end, and work given during a capture is noted and not done.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tokenspeed_kernel.registry import KernelSpec

Work = Callable[[], None]


class StandInStream:
    """A stream: its work is done when it is given."""

    def __init__(self, module: "StandInDevice", name: str) -> None:
        self._module = module
        self.name = name

    def wait_stream(self, stream: "StandInStream") -> None:
        self._module.note(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        self._module.wait(f"synchronize {self.name}")


class StandInDevice:
    """What both modules have. ``events``: what happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.capturing: StandInGraph | None = None
        self._main = StandInStream(self, "main")
        self._current = self._main
        self._streams = 0
        self._pools = 0
        self.stream_of_pool: dict[int, StandInStream] = {}

    def note(self, event: str) -> None:
        self.events.append(event)

    def wait(self, event: str) -> None:
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.note(event)

    def launch(self, work: Work) -> None:
        """What a kernel does: noted while its stream is captured, else done."""
        if self.capturing is None:
            work()
        else:
            self.capturing.nodes.append(work)

    def around(self, spec: KernelSpec, kernel: Callable[..., None]) -> Callable[..., None]:
        """``kernel`` as something that is launched; see KernelBinder."""
        return lambda *args: self.launch(lambda: kernel(*args))

    def Stream(self) -> StandInStream:
        self._streams += 1
        return StandInStream(self, f"side {self._streams}")

    def current_stream(self) -> StandInStream:
        return self._current

    @contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def graph_pool_handle(self) -> int:
        self._pools += 1
        return self._pools

    def synchronize(self) -> None:
        self.wait("synchronize")

    def enter(self, graph: "StandInGraph", pool: int | None, stream: StandInStream | None, mode: str) -> None:
        if self.capturing is not None:
            raise RuntimeError("a capture is under way on this device")
        self.wait("synchronize")
        assert mode in ("global", "thread_local", "relaxed")
        assert stream is not None, "graphs that share a pool need their stream said"
        assert stream is not self._main, "the main stream cannot be captured"
        if pool is not None and self.stream_of_pool.setdefault(pool, stream) is not stream:
            raise RuntimeError("a pool is captured into on one stream")
        self.capturing = graph
        self.note(f"begin on {stream.name}, pool {pool}, {mode}")


class StandInGraph:
    """A graph: the work noted while it was captured."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self.nodes: list[Work] = []
        self.ended = False
        self.broken = False

    def end(self) -> None:
        assert self._device.capturing is self
        self._device.capturing = None
        if self.broken:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        self.ended = True
        self._device.note(f"end of {len(self.nodes)} launches")

    def replay(self) -> None:
        if not self.ended:
            raise RuntimeError("called replay without a preceding successful capture")
        self._device.note("replay")
        for work in self.nodes:
            work()

    def reset(self) -> None:
        self._device.note("reset")
        self.nodes, self.ended = [], False


def _bound(signature: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()
    return dict(found.arguments)


class StandInCuda(StandInDevice):
    """torch.cuda."""

    def CUDAGraph(self, *args: Any, **kwargs: Any) -> StandInGraph:
        inspect.signature(torch.cuda.CUDAGraph.__new__).bind(torch.cuda.CUDAGraph, *args, **kwargs)
        return StandInGraph(self)

    @contextmanager
    def graph(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        said = _bound(inspect.signature(torch.cuda.graph.__init__), None, *args, **kwargs)
        graph: StandInGraph = said["cuda_graph"]
        self.enter(graph, said["pool"], said["stream"], said["capture_error_mode"])
        with self.stream(said["stream"]):
            try:
                yield
            finally:
                graph.end()


class StandInNpuGraph(StandInGraph):
    """torch.npu.NPUGraph: calls with lengths of the host's wait in a replay for those of ``update``."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__(device)
        self.auto_dispatch_capture = False
        self.records: list[dict[str, Any]] = []
        self._updated = False

    def note_call(self, work: Callable[[dict[str, Any]], None], **lengths: Any) -> None:
        """A call that torch_npu notes with its arguments."""
        if not self.auto_dispatch_capture:
            raise AssertionError("the lengths of this call would be frozen")
        record = dict(lengths)
        self.records.append(record)
        self.nodes.append(lambda: work(record))

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        assert self._device.events[-1].startswith("synchronize"), "the replay before may still read the old lengths"
        assert len(cpu_update_input) in (1, len(self.records))
        for record, new in zip(self.records, cpu_update_input * len(self.records), strict=False):
            for name in record.keys() & new.keys():
                record[name] = list(new[name])
        self._updated = True

    def replay(self) -> None:
        assert self._updated or not self.records, "the device would wait for ever"
        self._updated = False
        super().replay()


def _npu_graph(
    npu_graph: Any,
    pool: Any = None,
    stream: Any = None,
    auto_dispatch_capture: bool = False,
    capture_error_mode: str = "global",
) -> None:
    """The signature of torch.npu.graph, of torch_npu/npu/graphs.py."""


class StandInNpu(StandInDevice):
    """torch.npu."""

    def NPUGraph(self) -> StandInNpuGraph:
        return StandInNpuGraph(self)

    @contextmanager
    def graph(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        said = _bound(inspect.signature(_npu_graph), *args, **kwargs)
        graph: StandInNpuGraph = said["npu_graph"]
        graph.auto_dispatch_capture = said["auto_dispatch_capture"]
        self.enter(graph, said["pool"], said["stream"], said["capture_error_mode"])
        with self.stream(said["stream"]):
            try:
                yield
            finally:
                graph.end()
