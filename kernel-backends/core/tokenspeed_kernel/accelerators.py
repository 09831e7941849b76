"""What accelerator a process has, as PyTorch tells: NVIDIA and AMD by ``torch.cuda``, Ascend by ``torch.npu``.

None of it here is a normal case: a PyTorch without either, a driver that is absent, a machine without devices.
"""

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.platform import PlatformInfo, host_machine

KINDS = ("cuda", "npu")
"""PyTorch's names of devices. That of AMD's is cuda too."""

_DRIVER_FILES = {
    "nvidia": ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),
    "amd": ("/sys/module/amdgpu/version", r"^(\d[\d.]*)"),
    "npu": ("/usr/local/Ascend/driver/version.info", r"^Version\s*=\s*(\d[\d.]*)"),
}
"""Where a driver's version stands, and how it is written there."""


def runtime_of(kind: str) -> Any | None:
    """The module that speaks to devices of ``kind`` (``torch.cuda``, ``torch.npu``); None where it has none."""
    if kind == "npu" and not hasattr(torch, "npu") and find_spec("torch_npu") is not None:
        try:
            import_module("torch_npu")
        except Exception:  # without the vendor's libraries it raises whatever they raise
            return None
    runtime = getattr(torch, kind, None)
    return runtime if runtime is not None and runtime.is_available() else None


def find_accelerator() -> PlatformInfo | None:
    """The device that this process would compute on; None where there is none."""
    for kind in KINDS:
        runtime = runtime_of(kind)
        if runtime is not None:
            return accelerator(kind, int(runtime.current_device()))
    return None


@cache
def accelerator(kind: str, index: int) -> PlatformInfo:
    """Device number ``index`` of ``kind``. RuntimeError where there is none of that kind."""
    runtime = runtime_of(kind)
    if runtime is None:
        raise RuntimeError(f"PyTorch {torch.__version__} finds no device of kind {kind!r} on this machine")
    properties = runtime.get_device_properties(index)
    describe: Callable[[Any], PlatformInfo] = _ascend
    if kind == "cuda":
        describe = _nvidia if torch.version.hip is None else _amd
    return describe(properties)


def _nvidia(properties: Any) -> PlatformInfo:
    architecture = int(properties.major), int(properties.minor)
    return _info("nvidia", f"sm_{architecture[0]}{architecture[1]}", properties, architecture)


def _amd(properties: Any) -> PlatformInfo:
    name = str(properties.gcnArchName).partition(":")[0]
    return _info("amd", name, properties, (int(properties.major), int(properties.minor)))


def _ascend(properties: Any) -> PlatformInfo:
    name = re.sub(r"\W+", "_", str(properties.name)).lower()
    return _info("npu", name, properties, None)


def _info(vendor: str, isa: str, properties: Any, architecture: tuple[int, int] | None) -> PlatformInfo:
    return PlatformInfo(
        vendor=vendor,
        machine=host_machine(),
        isa=isa,
        features=frozenset({isa}),
        architecture=architecture,
        driver=_driver(vendor),
        cores=_first(properties, "multi_processor_count", "cube_core_num", "vector_core_num"),
        memory_bytes=int(properties.total_memory),
        shared_memory_bytes=_first(properties, "shared_memory_per_block_optin", "shared_memory_per_block"),
        wave_size=_first(properties, "warp_size"),
        description=str(properties.name),
    )


def _first(properties: Any, *names: str) -> int:
    """The first of these figures that the runtime tells; 0 where it tells none."""
    return next((int(value) for name in names if (value := getattr(properties, name, 0))), 0)


def _driver(vendor: str) -> tuple[int, ...] | None:
    path, pattern = _DRIVER_FILES[vendor]
    try:
        found = re.search(pattern, Path(path).read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return tuple(int(part) for part in found[1].split(".") if part) if found else None
