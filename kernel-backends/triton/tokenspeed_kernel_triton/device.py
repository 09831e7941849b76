"""What the host's part of a kernel asks of the device it runs on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from tokenspeed_kernel.accelerators import accelerator
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel_triton.configs import PROCESSORS, SHARED_MEMORY, WITHOUT_E4M3
from tokenspeed_kernel_triton.requirement import interpreted

INTERPRETED_AS = "sm_90"
"""The architecture whose tiles the interpreter takes."""

_compiled_for: ContextVar[str | None] = ContextVar("tokenspeed_triton_architecture", default=None)


@contextmanager
def compiling_for(architecture: str) -> Iterator[None]:
    """Within the block, every device counts as the largest of ``architecture``: for compiling ahead of time and for the
    interpreter. Raises ValueError for an architecture that configs.py does not know."""
    if architecture not in SHARED_MEMORY:
        raise ValueError(f"architecture {architecture!r} is unknown; use one of {', '.join(SHARED_MEMORY)}")
    token = _compiled_for.set(architecture)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def architecture_of(device: torch.device) -> str:
    """The entry of the tables in configs.py that serves the device; raises RuntimeError for one that none does."""
    return _compiled_for.get() or _architecture_found(device)


def processors_of(device: torch.device) -> int:
    """Its multiprocessors or compute units."""
    forced = _compiled_for.get()
    return PROCESSORS[forced] if forced is not None else _processors_found(device)


def loadable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels of its device take it: e4m3 as bytes where the architecture has no such type."""
    if tensor.dtype is torch.float8_e4m3fn and architecture_of(tensor.device) in WITHOUT_E4M3:
        return tensor.view(torch.uint8)
    return tensor


@cache
def _architecture_found(device: torch.device) -> str:
    if interpreted():
        return INTERPRETED_AS
    found = _platform_of(device)
    name = found.isa if found.vendor == "amd" or found.architecture is None else nvidia_entry(*found.architecture)
    if name not in SHARED_MEMORY:
        raise RuntimeError(f"{found.description} is {name}; the Triton kernels know {', '.join(SHARED_MEMORY)}")
    return name


def _platform_of(device: torch.device) -> PlatformInfo:
    index = torch.cuda.current_device() if device.index is None else device.index
    return accelerator(device.type, index)


def nvidia_entry(major: int, minor: int) -> str:
    """The newest known architecture of the same generation: sm_103 takes what is made for sm_100."""
    known = sorted(int(name[3:]) for name in SHARED_MEMORY if name.startswith("sm_"))
    fitting = [number for number in known if number // 10 == major and number % 10 <= minor]
    return f"sm_{fitting[-1] if fitting else 10 * major + minor}"


@cache
def _processors_found(device: torch.device) -> int:
    if interpreted():
        return PROCESSORS[INTERPRETED_AS]
    return _platform_of(device).cores
