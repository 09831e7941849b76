"""Graphs of GPUs and NPUs, over stand-ins that keep the real signatures and rules."""

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_maker import Request, groups_of, run
from stand_in_graphs import StandInCuda, StandInDevice, StandInNpu, StandInNpuGraph
from tiny_models import build, prompt_of, resolved, save, transformers_model

from tokenspeed.device import builder
from tokenspeed.device.graphs.ascend_graphs import LENGTH_ARGUMENTS, AscendGraphs
from tokenspeed.device.graphs.choice import EXCHANGED, choose_graphs, dispatch_graphs
from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.device.graphs.gpu_graphs import GpuGraphs
from tokenspeed.device.graphs.provider import NO_LENGTHS, Graph, GraphCaptureError, GraphProvider, PieceProvider
from tokenspeed.device.graphs.stream_graphs import StreamGraphs
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.recipes.resolved import ResolvedConfig, SchedulerSettings


def both() -> list[tuple[StandInDevice, StreamGraphs]]:
    cuda, npu = StandInCuda(), StandInNpu()
    return [(cuda, GpuGraphs(cuda)), (npu, AscendGraphs(npu))]


@pytest.mark.parametrize("index", [0, 1])
def test_captures_share_a_pool_and_a_side_stream_and_run_nothing(index: int) -> None:
    device, graphs = both()[index]
    done: list[int] = []
    graphs.warm_up(lambda: device.launch(lambda: done.append(0)))
    assert done == [0, 0], "warm runs are real"
    assert device.events == ["side 1 waits for main", "main waits for side 1", "synchronize"]
    device.events.clear()
    captured: list[Graph] = []
    for value in (1, 2):
        result, graph = graphs.capture(lambda value=value: device.launch(lambda: done.append(value)) or value)  # type: ignore[misc, func-returns-value]
        assert result == value
        captured.append(graph)
    assert done == [0, 0], "a capture runs nothing"
    assert device.events == ["synchronize", "begin on side 1, pool 1, thread_local", "end of 1 launches"] * 2
    for graph in (captured[1], captured[0], captured[1]):
        graph.replay(NO_LENGTHS, 0)
    assert done == [0, 0, 2, 1, 2]


@pytest.mark.parametrize("index", [0, 1])
def test_waiting_inside_a_capture_is_the_devices_error_and_leaves_it_usable(index: int) -> None:
    device, graphs = both()[index]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphs.capture(graphs.synchronize)
    assert device.capturing is None
    assert device.events[-1] == "reset"
    graphs.abandon()  # again: there is nothing to end
    _, graph = graphs.capture(lambda: None)
    graph.replay(NO_LENGTHS, 0)


@pytest.mark.parametrize("index", [0, 1])
def test_a_capture_that_does_not_end_well_is_told(index: int) -> None:
    device, graphs = both()[index]
    graphs.begin()
    assert device.capturing is not None
    device.capturing.broken = True
    with pytest.raises(GraphCaptureError, match="could not end a capture: cudaErrorStreamCaptureInvalidated"):
        graphs.end()


def test_the_stand_in_has_the_signatures_of_torch() -> None:
    """What is used of torch.cuda is there by these names, whether or not there is a device."""
    for name in ("Stream", "stream", "current_stream", "graph_pool_handle", "synchronize"):
        assert callable(getattr(torch.cuda, name))
    assert {"replay", "reset"} <= {name for name, _ in inspect.getmembers(torch.cuda.CUDAGraph)}
    cuda = StandInCuda()
    with pytest.raises(TypeError, match="unexpected keyword argument 'side_stream'"):
        cuda.graph(cuda.CUDAGraph(), side_stream=None).__enter__()
    with pytest.raises(TypeError):
        cuda.CUDAGraph(pool=1)
    npu = StandInNpu()
    with pytest.raises(TypeError, match="unexpected keyword argument 'check_input_liveness'"):
        npu.graph(npu.NPUGraph(), check_input_liveness=True).__enter__()


def test_lengths_of_the_hosts_are_updated_before_each_replay_of_an_npu() -> None:
    npu = StandInNpu()
    graphs = AscendGraphs(npu)
    seen: list[object] = []

    def attention() -> None:
        graph = npu.capturing
        assert isinstance(graph, StandInNpuGraph)
        graph.note_call(lambda record: seen.append(record["actual_seq_lengths_kv"]), actual_seq_lengths_kv=[9, 9, 9, 9])
        graph.note_call(lambda record: seen.append(record["actual_seq_kvlen"]), actual_seq_kvlen=[9, 9, 9, 9])

    _, graph = graphs.capture(attention)
    for before in ([4, 0, 7], [5, 1]):
        graph.replay(np.array(before, np.int32), 4)
    assert seen == [[5, 1, 8, 0]] * 2 + [[6, 2, 0, 0]] * 2
    assert set(LENGTH_ARGUMENTS) == {"actual_seq_lengths_kv", "actual_seq_kvlen"}


def test_work_that_a_device_refuses_to_capture_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    cuda = StandInCuda()
    graphs, hidden, runs = GpuGraphs(cuda), torch.zeros(2, 3), [0]

    def forward(_: ForwardBatch) -> torch.Tensor:
        runs[0] += 1
        cuda.launch(lambda: hidden.add_(1.0))  # type: ignore[arg-type, return-value]
        cuda.synchronize()
        return hidden

    decode = CapturedDecode(forward, graphs, sizes=(2,))
    decode.capturing(takes=True)
    ids = torch.zeros(2, dtype=torch.int32)
    assert decode(ForwardBatch(ids, ids, (), ()), np.zeros(2, np.int32)) is hidden
    assert caplog.messages[1:] == ["decode steps are not captured: operation not permitted when stream is capturing"]
    assert (decode.sizes, runs, cuda.capturing) == ([], [4], None)
    assert hidden[0, 0] == 3.0, "two warm runs and the plain one; what the capture noted was not done"


def test_pieces_can_begin_and_end_on_both() -> None:
    for _, graphs in both():
        assert isinstance(graphs, PieceProvider)


@pytest.mark.parametrize(
    ("settings", "device", "world", "reason"),
    [
        ({"graphs": "off"}, "cuda", 1, "scheduler.graphs is off"),
        ({}, "cpu", 2, EXCHANGED),
        ({"graphs": "dispatch"}, "cpu", 2, EXCHANGED),
        ({}, "cpu", 1, "there is no kernel to record"),
        ({}, "cuda", 1, "torch.cuda has no device here"),
        ({}, "npu", 1, "there are no graphs of a device 'npu' here"),
        ({}, "xpu", 1, "there are no graphs of a device 'xpu' here"),
    ],
)
def test_why_nothing_is_captured(
    settings: dict[str, object], device: str, world: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keys = SchedulerSettings.model_validate(settings)
    found = choose_graphs(keys, device, world=world, dispatch=dispatch_graphs(keys, "cpu"), kernels=())
    assert found == reason


def test_the_dispatch_recorder_is_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="the device is cuda; set it to auto"):
        dispatch_graphs(SchedulerSettings(graphs="dispatch"), "cuda")


def test_a_device_that_is_there_has_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, npu = StandInCuda(), StandInNpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    for device, kind in (("cuda", GpuGraphs), ("npu", AscendGraphs)):
        found = choose_graphs(SchedulerSettings(), device, world=2, dispatch=None, kernels=())
        assert isinstance(found, kind), "collectives of devices are captured too"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def of(family: str) -> Path:
        return save(transformers_model(family), tmp_path_factory.mktemp(family))

    return of


def configuration(folder: Path, **scheduler: object) -> ResolvedConfig:
    config = resolved(folder, enforce="determinism", max_seqs=6, chunk=256)
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update=scheduler)})


def tokens_of(config: ResolvedConfig) -> list[list[int]]:
    device = build(config)
    requests = [
        Request(prompt=prompt_of(length, length), row=row, max_new_tokens=count, chunk=20)
        for row, (length, count) in enumerate([(41, 12), (3, 7), (17, 9)], start=1)
    ]
    try:
        return list(run(device.handle, requests, granularity=16, groups=groups_of(device.specs)))
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize("family", ["llama", "kimi_linear"])
def test_a_model_is_captured_on_a_stand_in_and_gives_the_same_tokens(
    family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels are launches of the stand-in: what is captured runs when it is replayed, and not before."""
    folder, cuda = folders(family), StandInCuda()
    expected = tokens_of(configuration(folder, graphs="off"))

    def chosen(*_: object, **__: object) -> GraphProvider:
        return GpuGraphs(cuda)

    monkeypatch.setattr(builder, "dispatch_graphs", lambda *_: cuda)
    monkeypatch.setattr(builder, "choose_graphs", chosen)
    config = configuration(folder, capture_prefill_tokens=[16, 64], capture_sizes=[1, 4, 6], max_capture_batch=6)
    assert tokens_of(config) == expected
    layers = 2 if family == "llama" else 4
    begun = sum(event.startswith("begin") for event in cuda.events)
    assert begun == 3 + 2 * (layers + 1), "a graph for each size of decodes, a piece between the layers' breaks"
    served = cuda.events[max(place for place, event in enumerate(cuda.events) if event.startswith("end")) + 1 :]
    assert served[:2] == ["replay", "synchronize"], "the last size is run once, to see that it runs"
    assert set(served[2:]) == {"replay"}, "nothing waits and nothing is captured once all is"
