"""The machine that kernels run on, as a plain value.

``current_platform`` reads the machine once. Tests put another one in its place with ``override_platform``; the
environment variable ``TOKENSPEED_KERNEL_CPU_ISA`` lowers the instruction set, so that every path can be run on one
machine. Asking for more than the machine has is an error.
"""

import os
import platform as python_platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

CPU_ISA_VARIABLE = "TOKENSPEED_KERNEL_CPU_ISA"

ISA_FLAGS: dict[str, frozenset[str]] = {
    "scalar": frozenset(),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_vnni": frozenset({"avx512_vnni"}),
    "avx512_bf16": frozenset({"avx512_bf16"}),
}
"""Instruction-set levels from low to high, and the processor flags each adds to those before it."""

ISA_LEVELS: tuple[str, ...] = tuple(ISA_FLAGS)


class PlatformError(RuntimeError):
    """A platform setting that this machine cannot honour."""


@dataclass(frozen=True, kw_only=True)
class PlatformInfo:
    """A platform.

    Attributes:
        vendor: "cpu", "nvidia", "amd" or "npu".
        machine: the processor family, such as "x86_64".
        isa: for "cpu", one of ISA_LEVELS; else the architecture's name, such as "sm_90".
        features: what kernels may ask for by name; for "cpu" every level up to ``isa``.
        architecture: (major, minor) for accelerators, else None.
        driver: the driver's version for accelerators, else None.
        cores: processor cores this process may use.
        memory_bytes: memory this process may use, as the control group limits it.
    """

    vendor: str
    machine: str
    isa: str
    features: frozenset[str] = field(default_factory=frozenset)
    architecture: tuple[int, int] | None = None
    driver: tuple[int, ...] | None = None
    cores: int
    memory_bytes: int

    @property
    def key(self) -> str:
        """What measurements and verification records are keyed by, such as "cpu-x86_64-avx512_bf16"."""
        return f"{self.vendor}-{self.machine}-{self.isa}"


def features_up_to(isa: str) -> frozenset[str]:
    """Every instruction-set level up to ``isa``. Raises PlatformError for an unknown level."""
    if isa not in ISA_LEVELS:
        raise PlatformError(f"instruction set {isa!r} is unknown; use one of {list(ISA_LEVELS)}")
    return frozenset(ISA_LEVELS[: ISA_LEVELS.index(isa) + 1])


def isa_of_flags(flags: frozenset[str]) -> str:
    """The highest level all of whose flags, and those of the levels below it, are in ``flags``."""
    level = "scalar"
    for name, needed in ISA_FLAGS.items():
        if not needed <= flags:
            break
        level = name
    return level


def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None  # absent, or "max"


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    return min([physical, *(limit for limit in limits if limit is not None and limit > 0)])


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _detected() -> PlatformInfo:
    isa = isa_of_flags(_processor_flags())
    return PlatformInfo(
        vendor="cpu",
        machine=python_platform.machine(),
        isa=isa,
        features=features_up_to(isa),
        cores=_cores(),
        memory_bytes=_memory_bytes(),
    )


_override: ContextVar[PlatformInfo | None] = ContextVar("tokenspeed_kernel_platform", default=None)


def current_platform() -> PlatformInfo:
    """The platform in force: an override, else the machine, its instruction set lowered where the environment asks.

    Raises PlatformError where TOKENSPEED_KERNEL_CPU_ISA is unknown or above what the machine has.
    """
    overridden = _override.get()
    if overridden is not None:
        return overridden
    detected = _detected()
    wanted = os.environ.get(CPU_ISA_VARIABLE)
    if not wanted:
        return detected
    features = features_up_to(wanted)
    if wanted not in detected.features:
        raise PlatformError(
            f"{CPU_ISA_VARIABLE}={wanted} asks for more than this machine has ({detected.isa}); lower or unset it"
        )
    return replace(detected, isa=wanted, features=features)


@contextmanager
def override_platform(platform: PlatformInfo) -> Iterator[PlatformInfo]:
    """Within the block, ``current_platform()`` is ``platform`` (this thread or task only)."""
    token = _override.set(platform)
    try:
        yield platform
    finally:
        _override.reset(token)
