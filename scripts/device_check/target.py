"""The device that is checked, what is known of it, and how long calls on it take."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch

from tokenspeed_kernel.accelerators import KINDS, runtime_of
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.timing import CacheSweep, Timer

DISTRIBUTIONS = ("torch", "triton", "nvidia-cutlass-dsl", "flashinfer-python", "torch-npu", "tokenspeed-appliance")

Sizes = Literal["tiny", "full"]


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

    @cached_property
    def timer(self) -> Timer:
        """Of calls on it."""
        return Timer(self.device)

    @cached_property
    def _sweep(self) -> CacheSweep:
        return CacheSweep(self.timer)

    def seconds_of(self, call: Callable[[], object], *, runs: int) -> float:
        """The median time of a call that finds nothing in the caches, after some to warm up."""
        return self.timer.median_of(call, runs=runs, sweep=self._sweep)

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
