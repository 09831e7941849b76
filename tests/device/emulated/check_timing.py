"""Kernels of a device are timed by its events, out of its caches, and the faster one there is chosen."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import DeviceTensor
from emulated_streams import DEVICE
from kernel_toys import SIGNATURE, toy_workload, verified

from tokenspeed_kernel import binding, selection, timing, tuning, workloads
from tokenspeed_kernel.latency_table import cache_path, current_environment, read_table
from tokenspeed_kernel.oracle import SelectionOracle
from tokenspeed_kernel.platform import current_platform, select_device
from tokenspeed_kernel.registry import Band, KernelRegistry, KernelSpec, Operation, use_registry
from tokenspeed_kernel.timing import CacheSweep, Timer
from tokenspeed_kernel.traits import Range, TraitDeclaration

NPU = torch.device("npu")
QUICK_TO_CALL, QUICK_THERE = "quick_to_call", "quick_there"


def kernel(host: float, milliseconds: float) -> Callable[..., None]:
    """Copies on the device: ``host`` seconds of the host's, then so much of the device's time."""

    def copy(x: torch.Tensor, out: torch.Tensor) -> None:
        assert isinstance(x, DeviceTensor) and isinstance(out, DeviceTensor)
        time.sleep(host)
        out.copy_(x)
        DEVICE.milliseconds += milliseconds

    return copy


@pytest.fixture
def registry() -> KernelRegistry:
    registry = KernelRegistry()
    width = TraitDeclaration((Range,), int, "elements of a row", 64)
    registry.declare(
        Operation(family="toy", mode="copy", roles=frozenset({"input"}), traits={"width": width}, arguments="x, out")
    )
    for name, cost in ((QUICK_TO_CALL, (0.0, 3.0)), (QUICK_THERE, (0.002, 1.0))):
        spec = KernelSpec(
            name=name, family="toy", mode="copy", solution=name, signatures=frozenset({SIGNATURE}),
            traits={"width": Range(1)}, band=Band.PORTABLE,
        )  # fmt: skip
        registry.register(spec, kernel(*cost), "test")
    return registry


@pytest.fixture(autouse=True)
def _small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_DEVICE_EVICTION_BYTES", 1 << 20)


def test_calls_take_what_the_device_took() -> None:
    timer = Timer(NPU)
    told = timer.call(kernel(0.0, 2.5), torch.ones(4, device=NPU), torch.empty(4, device=NPU))
    DEVICE.milliseconds += 40.0  # of whatever comes behind
    assert told() == pytest.approx(2.5e-3)


def test_the_caches_are_swept_before_each_run(registry: KernelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    sweep = CacheSweep.__call__

    def noted(self: CacheSweep) -> None:
        assert self.device == NPU
        sweep(self)
        DEVICE.milliseconds += 0.5  # of the sweep, which no run is charged with
        swept.append(1)

    monkeypatch.setattr(CacheSweep, "__call__", noted)
    for cold in (True, False):
        swept.clear()
        workload = replace(toy_workload(SIGNATURE, {"width": 8}, "decode", None), cold=cold)
        times, failures = timing.time_kernels(registry.kernels(), workload, device=NPU, runs=3)
        assert not failures and len(swept) == 6
        assert times == {QUICK_THERE: [pytest.approx(1e-3)] * 3, QUICK_TO_CALL: [pytest.approx(3e-3)] * 3}


def test_what_a_device_says_late_is_its_kernels_failure(
    registry: KernelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def broken(x: torch.Tensor, out: torch.Tensor) -> None:
        runs.append("broken")

    def wait(self: Timer) -> None:
        if runs and runs.pop():
            runs.clear()
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Timer, "wait", wait)
    first = registry.kernels()[0]
    registry.register(replace(first.spec, name="broken", solution="broken"), broken, "test")
    workload = toy_workload(SIGNATURE, {"width": 8}, "decode", None)
    times, failures = timing.time_kernels(registry.kernels(), workload, device=NPU, runs=1)
    assert set(times) == {QUICK_THERE, QUICK_TO_CALL}
    assert failures == {"broken": "RuntimeError: an illegal memory access was encountered"}


def test_the_kernel_that_is_fast_there_is_chosen_and_kept_under_its_name(
    registry: KernelRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    monkeypatch.delenv(tuning.AUTOTUNE_VARIABLE, raising=False)
    monkeypatch.setitem(workloads._makers, "toy.copy", workloads._Maker(toy_workload, None))
    select_device("npu", 0)
    oracle = verified(SelectionOracle(), current_platform(), QUICK_TO_CALL, QUICK_THERE)
    for module in (binding, selection):
        monkeypatch.setattr(module, "default_oracle", lambda: oracle)
    with use_registry(registry):
        bound: Any = binding.bind("toy", "copy", SIGNATURE, {"width": 64}, override=None)
        here = current_environment(registry)
    assert bound.spec.name == QUICK_THERE
    assert here.device == "Emulated 1"
    kept = read_table(cache_path(here))
    assert {m.kernel: m.seconds for m in kept.measurements} == pytest.approx({QUICK_THERE: 1e-3, QUICK_TO_CALL: 3e-3})
    assert cache_path(replace(here, device="Emulated 2")) != cache_path(here)
