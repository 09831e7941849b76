"""Kernels of another project's library: where they run, and how the library comes in.

Where they run (its version, the driver that this PyTorch wants) is asked without importing it: listing kernels imports
nothing, and a library that breaks when it is imported must not break that. It comes in at the first use of a kernel.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import CapabilityRequirement
from tokenspeed_kernel.serving_guard import note_compilation


@cache
def installed_version(distribution: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """The first three numbers of a version: (0, 7, 4) of "0.7.4.post1"."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def spelled(version_numbers: Sequence[int]) -> str:
    """ "0.7.4" of (0, 7, 4)."""
    return ".".join(map(str, version_numbers))


def toolkit() -> str:
    """The CUDA or ROCm that this PyTorch is built for, such as "13.0"; empty where there is neither."""
    return torch.version.cuda or torch.version.hip or ""


@dataclass(frozen=True, kw_only=True)
class LibraryRequirement(CapabilityRequirement):
    """A platform, and a library in a version whose calls are known.

    Attributes:
        distribution: the library's name on the package index.
        oldest, too_new: its versions, from the one up to below the other.
        architectures: names of which the platform's must be one; empty: any.
        drivers: for a major version of CUDA or ROCm that PyTorch may be built for, the oldest driver. A driver that
            nobody could read is taken for new enough: the first call says otherwise.
        modules: what else must be there: (module, what to say where it is missing).
    """

    distribution: str
    oldest: tuple[int, ...]
    too_new: tuple[int, ...]
    architectures: frozenset[str] = frozenset()
    drivers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does."""
        return super().refusal(platform) or self._device_refusal(platform) or self._library_refusal()

    def _device_refusal(self, platform: PlatformInfo) -> str | None:
        if self.architectures and platform.isa not in self.architectures:
            return f"runs on {', '.join(sorted(self.architectures))}; this is {platform.isa}"
        built_for = numbers(toolkit())
        oldest = dict(self.drivers).get(built_for[0]) if built_for else None
        if oldest is None or platform.driver is None or platform.driver >= oldest:
            return None
        return (
            f"needs driver {spelled(oldest)} or newer, for this PyTorch is built for version {toolkit()}; "
            f"this is {spelled(platform.driver)}"
        )

    def _library_refusal(self) -> str | None:
        wanted = f"{self.distribution} from {spelled(self.oldest)} to below {spelled(self.too_new)}"
        found = installed_version(self.distribution)
        if found is None:
            return f"needs the package {wanted}, which is not installed"
        if not self.oldest <= numbers(found) < self.too_new:
            return f"needs the package {wanted}; installed is {found}"
        return next((said for module, said in self.modules if find_spec(module) is None), None)


@cache
def library_module(name: str) -> Any:
    """The library's module ``name``, brought in now. Raises ImportError, or whatever a broken library raises."""
    return import_module(name)


@cache
def note_variant(name: str, *facts: Any) -> None:
    """A library's function is called for the first time with these facts, for which it may compile. None may be while
    serving, so the guard counts it."""
    note_compilation(f"{name} ({', '.join(map(str, facts))})")
