"""Times kernels side by side: in turn, so that other work on the machine disturbs all alike, and by the median."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tokenspeed_kernel.accelerators import runtime_of
from tokenspeed_kernel.registry import KernelFunction, RegisteredKernel, make_kernel
from tokenspeed_kernel.workloads import Workload

RUNS = 15
WARM_RUNS = 2
LEAST_RUNS = 3
BUDGET_SECONDS = 2.0
"""Once a workload has taken this long, LEAST_RUNS runs of each kernel do."""

CPU = torch.device("cpu")

_EVICTION_LIMITS = (32 << 20, 128 << 20)

_DEVICE_EVICTION_BYTES = 512 << 20
"""Twice the largest cache that a device has before its memory."""

_LEAST_SECONDS = 1e-9
"""Above 0 even where the clock saw nothing pass."""


@cache
def _last_level_cache_bytes() -> int:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return _EVICTION_LIMITS[0]


class Timer:
    """How long calls take on a device: by its own events, where the host is done before the device has begun; by the
    host's clock where the host computes."""

    def __init__(self, device: torch.device = CPU) -> None:
        """RuntimeError where PyTorch finds no such device."""
        self.device = device
        self._runtime: Any = None
        if device.type != "cpu":
            self._runtime = runtime_of(device.type)
            if self._runtime is None:
                raise RuntimeError(f"PyTorch {torch.__version__} finds no device of kind {device.type!r} to time on")

    @property
    def is_host(self) -> bool:
        """Whether that is the host itself."""
        return self._runtime is None

    def wait(self) -> None:
        """Returns once the device has done all that it was given; raises what it has to say of it."""
        if self._runtime is not None:
            self._runtime.synchronize()

    def call(self, fn: Callable[..., object], *arguments: object) -> Callable[[], float]:
        """Calls ``fn``, and returns what waits for the end of it and tells the seconds that it took."""
        if self._runtime is None:
            begin = time.perf_counter()
            fn(*arguments)
            seconds = time.perf_counter() - begin
            return lambda: max(seconds, _LEAST_SECONDS)
        begun, ended = (self._runtime.Event(enable_timing=True) for _ in range(2))
        begun.record()
        fn(*arguments)
        ended.record()

        def told() -> float:
            ended.synchronize()
            return max(float(begun.elapsed_time(ended)) / 1e3, _LEAST_SECONDS)

        return told

    def median_of(self, fn: Callable[[], object], *, runs: int, sweep: "CacheSweep") -> float:
        """The median time of ``fn`` whose inputs are in memory alone, after WARM_RUNS calls to warm up."""
        for _ in range(WARM_RUNS):
            fn()
        self.wait()
        seconds = []
        for _ in range(runs):
            sweep()
            seconds.append(self.call(fn)())
        return median(seconds)


class CacheSweep:
    """Memory that is read through between calls, so that the next call finds its inputs in memory alone. On a device
    it is queued, and what is queued behind it begins without a gap."""

    def __init__(self, timer: Timer | None = None) -> None:
        self._timer = timer or Timer()
        smallest, largest = _EVICTION_LIMITS
        size = min(max(2 * _last_level_cache_bytes(), smallest), largest)
        self._memory = torch.ones(
            (size if self._timer.is_host else _DEVICE_EVICTION_BYTES) // 4, device=self._timer.device
        )
        self._last: Callable[[], float] | None = None
        self._fastest = 0.0

    @property
    def device(self) -> torch.device:
        """Whose caches it sweeps."""
        return self._timer.device

    @property
    def bytes_per_second(self) -> float:
        """Of the fastest sweep so far, which is the memory's read bandwidth as torch's sum reaches it; 0.0 before the
        first."""
        if self._last is not None:
            self._fastest = max(self._fastest, self._memory.numel() * 4 / self._last())
            self._last = None
        return self._fastest

    def __call__(self) -> None:
        """Sweeps, or queues it; the last sweep is over by then."""
        self._fastest = self.bytes_per_second
        self._last = self._timer.call(self._memory.sum)


def callable_of(kernel: RegisteredKernel, values: Mapping[str, object]) -> KernelFunction:
    """The kernel as it is called, made from the bound values where its operation binds some."""
    return make_kernel(kernel.spec, kernel.fn, values) if values else kernel.fn


def on_device(workload: Workload, device: torch.device) -> Workload:
    """The workload with its tensors there."""
    if device.type == "cpu":
        return workload
    # Imported here: the numerics import the binding, which tunes.
    from tokenspeed_kernel.numerics.on_device import arguments_on, values_on

    bound, arguments = values_on(device, workload.bound), arguments_on(device, workload.arguments)
    return replace(workload, bound=bound, arguments=arguments)


def time_kernels(
    kernels: Sequence[RegisteredKernel],
    workload: Workload,
    *,
    device: torch.device = CPU,
    runs: int = RUNS,
    sweep: CacheSweep | None = None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each run by kernel on ``device``, and what the kernels that raised said instead.

    Each round runs every kernel once; a cold workload is swept out of the caches before each run, and a device is kept
    busy before each, so that it does not wait for the host within one. A kernel that raises is left out from there on:
    whatever a stranger's kernel raises must not end the measuring of the others. ``sweep``: of the same device.
    """
    timer = Timer(device)
    workload = on_device(workload, device)
    failures: dict[str, str] = {}
    ready: dict[str, KernelFunction] = {}
    for kernel in kernels:
        try:
            ready[kernel.spec.name] = callable_of(kernel, workload.bound)
            for _ in range(WARM_RUNS):
                ready[kernel.spec.name](*workload.arguments)
            timer.wait()
        except Exception as error:
            ready.pop(kernel.spec.name, None)
            failures[kernel.spec.name] = f"{type(error).__name__}: {error}"
    sweep = (sweep or CacheSweep(timer)) if workload.cold or not timer.is_host else None
    times: dict[str, list[float]] = {name: [] for name in ready}
    begin = time.perf_counter()
    for done in range(max(runs, 1)):
        if done >= LEAST_RUNS and time.perf_counter() - begin > BUDGET_SECONDS:
            break
        for name, fn in ready.items():
            if sweep is not None:
                sweep()
                if not workload.cold:
                    fn(*workload.arguments)  # which brings into the caches what a step finds there
            times[name].append(timer.call(fn, *workload.arguments)())
    return times, failures


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each kernel's runs, in seconds."""
    return {name: median(runs) for name, runs in times.items() if runs}
