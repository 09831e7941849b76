"""The handle: its methods are pinned, failures stay in their step, and the control plane touches no tensor."""

import gc
import inspect
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_maker import Delta, FakePlan, PlanMaker, Request, collect, ints, run
from tiny_models import build, resolved, save, transformers_model

from tokenspeed.device.block_tables import BlockTableMismatch
from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.guard import GUARD_VARIABLE, ControlPlaneViolation, control_plane_guard
from tokenspeed.device.handle import DeviceHandle, StepFailed
from tokenspeed.device.local_handle import LocalDeviceHandle
from tokenspeed.device.runner import Runner
from tokenspeed.messages import SamplingParameters

GRANULARITY = 16
POISONED_TOKEN = 99
"""The embedding of this token is NaN in the test's checkpoint."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformers_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[POISONED_TOKEN] = torch.nan
    return save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def device(folder: Path) -> Iterator[DeviceBuild]:
    made = build(resolved(folder))
    yield made
    made.handle.shutdown()


def plan_of(*requests: Request) -> tuple[FakePlan, list]:
    return PlanMaker(GRANULARITY).plan(requests)


def test_the_methods_are_pinned() -> None:
    for handle in (DeviceHandle, LocalDeviceHandle):
        public = [name for name, _ in inspect.getmembers(handle, inspect.isfunction) if not name.startswith("_")]
        assert public == ["execute", "finished_operations", "shutdown", "storage_usage"]


def test_specs_are_plain_and_true(device: DeviceBuild) -> None:
    specs = device.specs
    (group,) = specs.groups
    assert (group.kind, group.block_granularity, group.children_per_parent) == ("full_history", GRANULARITY, 1)
    assert group.bytes_per_block == 2 * 2 * 2 * GRANULARITY * 16 * 4  # layers, fields, heads, tokens, dim, float32
    assert specs.arena_bytes == (specs.num_parents + 1) * group.bytes_per_block
    assert (specs.vocab_size, specs.max_model_len, specs.max_num_seqs, specs.device) == (128, 128, 4, "cpu")
    assert specs.workspace_bytes > 0
    assert {"gemm.linear", "attention.decode", "sampling.sample"} <= specs.kernels.keys()
    parameters = sum(parameter.numel() for parameter in transformers_model("llama").parameters())
    assert specs.weight_bytes == parameters * 4


def test_an_empty_plan_gives_an_empty_result(device: DeviceBuild) -> None:
    result = device.handle.execute(FakePlan(forward_id=0), []).result()  # type: ignore[arg-type]
    assert (result.forward_id, result.tokens.size, result.nan.size) == (0, 0, 0)


def test_a_chunk_that_does_not_sample_has_no_token(device: DeviceBuild) -> None:
    plan, starts = plan_of(Request(prompt=[1, 2, 3, 4], row=1, chunk=2), Request(prompt=[5], row=2))
    result = device.handle.execute(plan, starts).result()  # type: ignore[arg-type]
    assert result.tokens[0] == -1
    assert result.tokens[1] >= 0
    timings = result.timings
    assert min(timings.queued, timings.prepare, timings.forward, timings.sample) >= 0


def test_a_row_with_nan_is_flagged_alone_and_a_queued_step_survives_it(device: DeviceBuild) -> None:
    sound, sick = Request(prompt=[1, 2, 3], row=1), Request(prompt=[1, POISONED_TOKEN], row=2)
    expected = run(device.handle, [Request(prompt=[1, 2, 3], row=3, max_new_tokens=2)], granularity=GRANULARITY)[0]
    maker = PlanMaker(GRANULARITY)
    queued = []
    for _ in range(2):  # the second step is queued before the first one's token is known to be missing
        plan, starts = maker.plan([sound, sick])
        queued.append((plan, device.handle.execute(plan, starts)))  # type: ignore[arg-type]
    for plan, step in queued:
        result = step.result()
        assert result.nan.tolist() == [False, True]
        assert result.tokens[1] == -1
        collect(plan, result, [sound, sick])
    assert sound.output == expected


def test_a_failed_forward_fails_its_step_only(device: DeviceBuild) -> None:
    good = [Request(prompt=[1, 2, 3], row=1, max_new_tokens=6)]
    expected = run(device.handle, [Request(prompt=[1, 2, 3], row=1, max_new_tokens=6)], granularity=GRANULARITY)
    bad, starts = plan_of(Request(prompt=[1, 128], row=2))
    with pytest.raises(StepFailed, match="has the token 128, the vocabulary ends at 127") as caught:
        device.handle.execute(bad, starts).result()  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, ValueError)
    assert run(device.handle, good, granularity=GRANULARITY) == expected


def test_an_exception_inside_the_model_fails_its_step_only(
    device: DeviceBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Runner._batch, []

    def failing(self: Runner, *arguments: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room")
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "_batch", failing)
    plans = [plan_of(Request(prompt=[1, 2, 3], row=row)) for row in (1, 2, 3)]
    steps = [device.handle.execute(plan, starts) for plan, starts in plans]  # type: ignore[arg-type]
    assert steps[0].result().tokens == steps[2].result().tokens
    with pytest.raises(StepFailed, match="MemoryError: no room"):
        steps[1].result()
    assert all(step.done() for step in steps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_len": ints([2])}, "has 1 input ids for rows of"),
        ({"input_len": ints([0]), "input_ids": ints()}, "has 0 input ids"),
        (
            {"row": ints([1] * 5), "kind": ints([1] * 5), "input_len": ints([1] * 5), "input_ids": ints([1] * 5)},
            "has 5 rows and 5 tokens, the device is built for 4 rows and 68 tokens; raise scheduler.max_seqs",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(device: DeviceBuild, change: dict[str, object], words: str) -> None:
    plan, starts = plan_of(Request(prompt=[1], row=1))
    for name, value in change.items():
        setattr(plan, name, value)
    with pytest.raises(StepFailed, match=words):
        device.handle.execute(plan, starts).result()  # type: ignore[arg-type]


def test_tables_out_of_step_end_the_device(device: DeviceBuild) -> None:
    maker, request = PlanMaker(GRANULARITY), Request(prompt=[1, 2, 3], row=1)
    plan, starts = maker.plan([request])
    device.handle.execute(plan, starts).result()  # type: ignore[arg-type]
    plan, starts = maker.plan([request])
    plan.tables = [Delta(*(ints([value]) for value in (1, 1, 1, 5, 6, 2)))]
    with pytest.raises(StepFailed, match="from version 5 to 6 came, the table has version 1") as caught:
        device.handle.execute(plan, starts).result()  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, BlockTableMismatch)
    plan, starts = plan_of(Request(prompt=[1], row=2))
    with pytest.raises(StepFailed, match="from version 5 to 6"):
        device.handle.execute(plan, starts).result()  # type: ignore[arg-type]


def test_blocks_are_zeroed_and_copied_before_the_batch(device: DeviceBuild) -> None:
    """A copied block serves as a cached prefix: the copy has what the source has, and a zeroed one has not."""
    prompt = list(range(3, 3 + GRANULARITY + 4))
    first = Request(prompt=prompt, row=1, max_new_tokens=4)
    expected = run(device.handle, [first], granularity=GRANULARITY)[0]  # blocks 1 and 2

    def with_prefix(*, copy: list[list[int]], zero: list[int]) -> int:
        plan = FakePlan(
            row=ints([2]),
            kind=ints([0]),
            input_len=ints([4]),
            prefix_len=ints([GRANULARITY]),
            prompt_len=ints([len(prompt)]),
            samples=ints([1]),
            input_ids=ints(prompt[GRANULARITY:]),
            tables=[Delta(*(ints(values) for values in ([2], [0], [2], [0], [1], [5, 6])))],
            copy_blocks=[np.array(copy, np.int32).reshape(-1, 2)],
            zero_blocks=[ints(zero)],
        )
        _, starts = plan_of(Request(prompt=prompt, row=2))
        return int(device.handle.execute(plan, starts).result().tokens[0])  # type: ignore[arg-type]

    assert with_prefix(copy=[[1, 5]], zero=[6]) == expected[0]
    assert with_prefix(copy=[], zero=[5]) != expected[0]


def test_results_survive_later_steps(device: DeviceBuild) -> None:
    kept: list[tuple[np.ndarray, list[int]]] = []
    request = Request(prompt=[1, 2], row=1, max_new_tokens=6)
    run(
        device.handle,
        [request],
        granularity=GRANULARITY,
        watch=lambda plan, result: kept.append((result.tokens, result.tokens.tolist())),
    )
    assert [tokens.tolist() for tokens, _ in kept] == [values for _, values in kept]


def test_shutdown_may_come_twice_frees_the_device_side_and_ends_the_thread(folder: Path) -> None:
    device = build(resolved(folder))
    pending = device.handle.execute(*plan_of(Request(prompt=[1], row=1)))  # type: ignore[arg-type]
    runner = weakref.ref(device.handle._runner)  # type: ignore[attr-defined]
    device.handle.shutdown()
    device.handle.shutdown()
    assert pending.result().tokens.size == 1
    gc.collect()
    assert runner() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "forward"]
    with pytest.raises(RuntimeError, match="was shut down"):
        device.handle.execute(FakePlan(), [])  # type: ignore[arg-type]


def test_the_control_planes_thread_runs_no_tensor_operation(
    device: DeviceBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GUARD_VARIABLE, "1")
    with control_plane_guard():
        with pytest.raises(ControlPlaneViolation, match="ran on the control plane's thread"):
            torch.zeros(1) + 1
        sampling = SamplingParameters(top_k=1, logprobs=2, prompt_logprobs=1, frequency_penalty=0.5)
        requests = [Request(prompt=[1, 2, 3], row=1, sampling=sampling), Request(prompt=[4], row=2)]
        assert all(len(output) == 8 for output in run(device.handle, requests, granularity=GRANULARITY, overlap=1))


def test_the_guard_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "0"):
        monkeypatch.delenv(GUARD_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(GUARD_VARIABLE, value)
        with control_plane_guard():
            assert float(torch.zeros(1) + 1) == 1
