"""What kernels run on, as a plain value: the accelerator of this process, or the machine's own processor.

``current_platform`` reads it once. An engine says which of both it computes on with ``select_device``; where none did,
the environment variable ``TOKENSPEED_KERNEL_DEVICE`` does, and else it is the accelerator where there is one. Tests put
another platform in its place with ``override_platform``; ``TOKENSPEED_KERNEL_CPU_ISA`` lowers the instruction set, so
that every path can be run on one machine. Asking for more than the machine has is an error.
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

DEVICE_VARIABLE = "TOKENSPEED_KERNEL_DEVICE"
"""What to compute on where no engine says it: "cpu", "cuda" (NVIDIA and AMD) or "npu"."""

DEVICES = ("cpu", "cuda", "npu")

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
        vendor: "cpu", "nvidia", "amd", "npu", or one of a vendor_platforms.VendorPlatform.
        machine: the processor family, such as "x86_64".
        isa: for "cpu", one of ISA_LEVELS; else the architecture's name, such as "sm_90", "gfx950" or "ascend910b3".
        features: what kernels may ask for by name; for "cpu" every level up to ``isa``, else ``isa``.
        architecture: (major, minor) for accelerators that count so, else None.
        driver: the driver's version for accelerators, None where nothing tells.
        cores: processor cores this process may use; of an accelerator its multiprocessors, compute units or AI cores.
        memory_bytes: memory this process may use, as the control group limits it; of an accelerator all it has.
        shared_memory_bytes: what a block of threads may have of an accelerator's shared memory (LDS); 0: not known.
        wave_size: threads that an accelerator runs in step (warp, wave); 0: it has none, or does not tell.
        description: what its maker calls an accelerator.
    """

    vendor: str
    machine: str
    isa: str
    features: frozenset[str] = field(default_factory=frozenset)
    architecture: tuple[int, int] | None = None
    driver: tuple[int, ...] | None = None
    cores: int
    memory_bytes: int
    shared_memory_bytes: int = 0
    wave_size: int = 0
    description: str = ""

    @property
    def key(self) -> str:
        """What measurements and verification records are keyed by, such as "cpu-x86_64-avx512_bf16" or
        "nvidia-sm_90"."""
        return f"cpu-{self.machine}-{self.isa}" if self.vendor == "cpu" else f"{self.vendor}-{self.isa}"


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


def host_machine() -> str:
    """The processor family of this machine, such as "x86_64"."""
    return python_platform.machine()


@cache
def _detected() -> PlatformInfo:
    isa = isa_of_flags(_processor_flags())
    return PlatformInfo(
        vendor="cpu",
        machine=host_machine(),
        isa=isa,
        features=features_up_to(isa),
        cores=_cores(),
        memory_bytes=_memory_bytes(),
    )


_override: ContextVar[PlatformInfo | None] = ContextVar("tokenspeed_kernel_platform", default=None)


_selected: PlatformInfo | None = None
_is_selected = False


def select_device(kind: str, index: int = 0) -> PlatformInfo:
    """From here on this process computes on device number ``index`` of ``kind`` (one of DEVICES, or a vendor's that
    joined by vendor_platforms.py), whatever else there is. Returns the platform. Raises PlatformError for an unknown
    kind, or one of which there is no device."""
    global _selected, _is_selected
    _selected, _is_selected = _device(kind, index), True
    return current_platform()


def _device(kind: str, index: int) -> PlatformInfo | None:
    """None: this machine's own processor."""
    if kind == "cpu":
        return None
    strange = _of_a_stranger(kind)
    if strange is not None:
        return strange
    kinds = known_kinds()
    if kind not in kinds:
        raise PlatformError(f"a device of kind {kind!r} is unknown; use one of {', '.join(kinds)}")
    if kind not in DEVICES:
        raise PlatformError(f"the package that brought devices of kind {kind!r} finds none on this machine")
    from tokenspeed_kernel.accelerators import accelerator  # it brings PyTorch in

    try:
        return accelerator(kind, index)
    except RuntimeError as error:
        raise PlatformError(f"{error}; install the driver and a PyTorch built for it, or compute on the CPU") from error


def known_kinds() -> tuple[str, ...]:
    """DEVICES, and the kinds of vendors whose packages are loaded."""
    from tokenspeed_kernel.registry import active_registry  # it needs this module
    from tokenspeed_kernel.vendor_platforms import kinds_of_devices

    return kinds_of_devices(active_registry().platforms())


def _of_a_stranger(kind: str | None) -> PlatformInfo | None:
    """The platform that a vendor's package says devices of ``kind`` (None: any) are; None where none says so."""
    from tokenspeed_kernel.registry import active_registry  # it needs this module
    from tokenspeed_kernel.vendor_platforms import claimed

    return claimed(active_registry().platforms(), kind)


@cache
def _found(wanted: str) -> PlatformInfo | None:
    """What the environment asks for, "" for the accelerator that there is; None: this machine's own processor."""
    if wanted:
        try:
            return _device(wanted, 0)
        except PlatformError as error:
            raise PlatformError(f"{DEVICE_VARIABLE}={wanted}: {error}") from None
    from tokenspeed_kernel.accelerators import find_accelerator  # it brings PyTorch in

    return find_accelerator()


def current_platform() -> PlatformInfo:
    """The platform in force: an override, else what ``select_device`` chose, else what the environment names, else an
    accelerator where there is one, else the machine, its instruction set lowered where the environment asks. What a
    vendor's package says is its own (vendor_platforms.py) is that vendor's platform.

    Raises PlatformError where TOKENSPEED_KERNEL_CPU_ISA is unknown or above what the machine has, or where there is no
    device as TOKENSPEED_KERNEL_DEVICE asks for.
    """
    overridden = _override.get()
    if overridden is not None:
        return overridden
    asked = os.environ.get(DEVICE_VARIABLE, "")
    accelerator = _selected if _is_selected else _found(asked)
    # Where nobody said what to compute on, a vendor's devices of any kind count, else those on the host's memory.
    accelerator = accelerator or _of_a_stranger("cpu" if _is_selected or asked else None)
    return accelerator or host_platform()


def host_platform() -> PlatformInfo:
    """This machine's own processor, whatever accelerator there is: for what runs on the host in any case. An override
    of that kind counts, and so does TOKENSPEED_KERNEL_CPU_ISA; raises PlatformError as current_platform does for it."""
    overridden = _override.get()
    if overridden is not None and overridden.vendor == "cpu":
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
