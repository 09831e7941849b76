"""Times kernels side by side: in turn, so that other work on the machine disturbs all alike, and by the median."""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import torch

from tokenspeed_kernel.registry import KernelFunction, RegisteredKernel, make_kernel
from tokenspeed_kernel.workloads import Workload

RUNS = 15
WARM_RUNS = 2
LEAST_RUNS = 3
BUDGET_SECONDS = 2.0
"""Once a workload has taken this long, LEAST_RUNS runs of each kernel do."""

_EVICTION_LIMITS = (32 << 20, 128 << 20)


@cache
def _last_level_cache_bytes() -> int:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return _EVICTION_LIMITS[0]


class CacheSweep:
    """Memory that is read through between calls, so that the next call finds its inputs in memory alone.

    Attributes:
        bytes_per_second: the fastest sweep so far, which is the machine's read bandwidth as torch's sum reaches it;
            0.0 before the first.
    """

    def __init__(self) -> None:
        smallest, largest = _EVICTION_LIMITS
        size = min(max(2 * _last_level_cache_bytes(), smallest), largest)
        self._memory = torch.ones(size // 4)
        self.bytes_per_second = 0.0

    def __call__(self) -> None:
        seconds = max(_seconds(self._memory.sum, ()), 1e-9)
        self.bytes_per_second = max(self.bytes_per_second, self._memory.numel() * 4 / seconds)


def _seconds(fn: KernelFunction, arguments: tuple[object, ...]) -> float:
    begin = time.perf_counter()
    fn(*arguments)
    return time.perf_counter() - begin


def callable_of(kernel: RegisteredKernel, values: Mapping[str, object]) -> KernelFunction:
    """The kernel as it is called, made from the bound values where its operation binds some."""
    return make_kernel(kernel.spec, kernel.fn, values) if values else kernel.fn


def time_kernels(
    kernels: Sequence[RegisteredKernel], workload: Workload, *, runs: int = RUNS, sweep: CacheSweep | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each run by kernel, and what the kernels that raised said instead.

    Each round runs every kernel once; a cold workload is swept out of the caches before each run. A kernel that
    raises is left out from there on: whatever a stranger's kernel raises must not end the measuring of the others.
    """
    failures: dict[str, str] = {}
    ready: dict[str, KernelFunction] = {}
    for kernel in kernels:
        try:
            ready[kernel.spec.name] = callable_of(kernel, workload.bound)
            for _ in range(WARM_RUNS):
                ready[kernel.spec.name](*workload.arguments)
        except Exception as error:
            ready.pop(kernel.spec.name, None)
            failures[kernel.spec.name] = f"{type(error).__name__}: {error}"
    sweep = (sweep or CacheSweep()) if workload.cold else None
    times: dict[str, list[float]] = {name: [] for name in ready}
    begin = time.perf_counter()
    for done in range(max(runs, 1)):
        if done >= LEAST_RUNS and time.perf_counter() - begin > BUDGET_SECONDS:
            break
        for name, fn in ready.items():
            if sweep is not None:
                sweep()
            times[name].append(_seconds(fn, workload.arguments))
    return times, failures


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each kernel's runs, in seconds; above 0 even where the clock saw nothing pass."""
    return {name: max(median(runs), 1e-9) for name, runs in times.items() if runs}
