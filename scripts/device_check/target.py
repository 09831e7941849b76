"""The device that is checked, what is known of it, and how long calls on it take."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, Literal

import torch

from tokenspeed_kernel.platform import PlatformInfo

KINDS = ("cuda", "npu")
"""What PyTorch calls accelerators; AMD's are cuda too."""

DISTRIBUTIONS = ("torch", "triton", "nvidia-cutlass-dsl", "flashinfer-python", "torch-npu", "tokenspeed-appliance")

Sizes = Literal["tiny", "full"]


def runtime_of(kind: str) -> Any | None:
    """The module of PyTorch that speaks to devices of ``kind``; None where it has none."""
    runtime = getattr(torch, kind, None)
    return runtime if runtime is not None and runtime.is_available() else None


def found_kind() -> str | None:
    """The kind of accelerator that is here; None where none is."""
    return next((kind for kind in KINDS if runtime_of(kind) is not None), None)


@dataclass(frozen=True)
class Target:
    """A device to check: its kind ("cpu", "cuda", "npu") and the sizes of what is run on it."""

    kind: str
    sizes: Sizes

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        return torch.device(self.kind)

    @property
    def vendor(self) -> str:
        """Whose devices they are, as recipes name it."""
        return ("nvidia" if torch.version.hip is None else "amd") if self.kind == "cuda" else self.kind

    def synchronize(self) -> None:
        """Waits for all work that was given to it."""
        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize()

    def seconds_of(self, call: Callable[[], object], *, runs: int) -> float:
        """The median time of a call, after two to warm up; on a device by its own events, around each call."""
        for _ in range(2):
            call()
        self.synchronize()
        return median(self._seconds(call) for _ in range(runs))

    def _seconds(self, call: Callable[[], object]) -> float:
        if self.kind == "cpu":
            begin = time.perf_counter()
            call()
            return max(time.perf_counter() - begin, 1e-9)
        runtime = getattr(torch, self.kind)
        begin_event, end_event = (runtime.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return max(float(begin_event.elapsed_time(end_event)) / 1e3, 1e-9)

    def facts(self, platform: PlatformInfo) -> dict[str, str | int]:
        """What the device is and what drives it."""
        facts: dict[str, str | int] = {
            "platform": platform.key,
            "kind": self.kind,
            "sizes": self.sizes,
            "processors": platform.cores,
            "memory_bytes": platform.memory_bytes,
            "driver": ".".join(map(str, platform.driver or ())) or "not known",
        }
        if self.kind != "cpu":
            facts["name"] = str(getattr(torch, self.kind).get_device_name())
        return facts


def versions() -> dict[str, str]:
    """Of what is installed and takes part; and what PyTorch was built for."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    built_for = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return found | {name: text for name, text in built_for.items() if text}
