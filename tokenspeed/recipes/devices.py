"""Accelerators of each vendor, from its tool's output or the kernel's own files; each look is bounded in time."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.schema import Vendor

TOOL_TIMEOUT_S = 5.0
"""A driver that is being loaded answers late, a broken one never."""

_GIB = 1 << 30
_ASCEND_FAMILIES = (("910B", "a2"), ("910_93", "a3"), ("910", "a3"), ("950", "950"))
"""What npu-smi calls a device, by prefix, and the family whose image it takes; plain "Ascend910" is an A3's 910C."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Devices of one kind. ``arch`` "" and ``gb_per_device`` 0 where the driver does not tell.

    ``driver`` is its version and ``runtime`` that of CUDA, ROCm or CANN, "" where nothing tells.
    """

    vendor: Vendor
    arch: str
    count: int
    gb_per_device: int
    description: str
    driver: str = ""
    runtime: str = ""


def nvidia_devices(root: Path) -> list[Accelerator]:
    """NVIDIA's, by nvidia-smi; a driver that does not answer is said to be silent."""
    if not any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg")):
        return []
    rows = run_tool(
        "nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits"
    )
    kinds = Counter(
        tuple(part.strip() for part in row.split(",")) for row in (rows or "").splitlines() if row.count(",") == 3
    )
    if not kinds:
        count = max(1, len(list((root / "dev").glob("nvidia[0-9]*"))))
        silent = "NVIDIA device (driver silent)"
        driver = _first_match(
            r"Kernel Module.*?\s(\d+\.[\d.]+)", _read(root / "proc" / "driver" / "nvidia" / "version")
        )
        return [Accelerator(vendor="nvidia", arch="", count=count, gb_per_device=0, description=silent, driver=driver)]
    return [
        Accelerator(
            vendor="nvidia",
            arch=f"sm{capability.replace('.', '')}" if re.fullmatch(r"\d+\.\d+", capability) else "",
            count=count,
            gb_per_device=int(memory) // 1024 if memory.isdigit() else 0,  # shared with the host: [N/A]
            description=name,
            driver=driver,
        )
        for (name, memory, capability, driver), count in kinds.items()
    ]


def cuda_version() -> str:
    """The newest CUDA that the driver runs, as nvidia-smi tells; "" where it does not."""
    return _first_match(r"CUDA Version\s*:\s*([\d.]+)", run_tool("nvidia-smi", "--version") or "")


def amd_devices(root: Path) -> list[Accelerator]:
    """AMD's, by the kernel's own files."""
    driver = _read(root / "sys" / "module" / "amdgpu" / "version").strip()
    runtime = _read(root / "opt" / "rocm" / ".info" / "version").strip().partition("-")[0]
    kinds: Counter[tuple[str, int, str]] = Counter()
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*")):
        properties = _pairs(_read(node / "properties"))
        version = properties.get("gfx_target_version", 0)
        if version == 0:  # a CPU node, or a device that this container may not see
            continue
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        banks = [_pairs(_read(bank / "properties")) for bank in sorted(node.glob("mem_banks/*"))]
        size = sum(bank.get("size_in_bytes", 0) for bank in banks)
        render = root / "sys/class/drm" / f"renderD{properties.get('drm_render_minor', 0)}" / "device/product_name"
        kinds[arch, size // _GIB, _read(render).strip() or f"AMD {arch}"] += 1
    return [
        Accelerator(
            vendor="amd",
            arch=arch,
            count=count,
            gb_per_device=size,
            description=name,
            driver=driver,
            runtime=runtime,
        )
        for (arch, size, name), count in kinds.items()
    ]


def ascend_devices(root: Path) -> list[Accelerator]:
    """Ascend's, by device files for the count and npu-smi for the rest."""
    count = len(list((root / "dev").glob("davinci[0-9]*")))
    if count == 0:
        return []
    told = run_tool("npu-smi", "info") or ""
    names = Counter(re.findall(r"^\|\s*\d+\s+(?:Ascend\s*)?(\d{3}\w*)\s+\|", told, re.MULTILINE))
    sizes = [int(size) for size in re.findall(r"/\s*(\d+)\s*\|\s*$", told, re.MULTILINE)]
    name = names.most_common(1)[0][0] if names else ""
    arch = next((family for prefix, family in _ASCEND_FAMILIES if name.startswith(prefix)), "")
    return [
        Accelerator(
            vendor="npu",
            arch=arch,
            count=count,
            gb_per_device=round(max(sizes, default=0) / 1024),
            description=f"Ascend {name}" if name else "Ascend NPU",
            driver=_first_match(r"^Version\s*=\s*(\S+)", _read(root / "usr/local/Ascend/driver/version.info")),
            runtime=_cann_version(root),
        )
    ]


def _cann_version(root: Path) -> str:
    toolkit = root / "usr/local/Ascend/ascend-toolkit/latest"
    paths: Iterable[Path] = (toolkit / "version.cfg", *sorted(toolkit.glob("*-linux/ascend_toolkit_install.info")))
    texts = (_first_match(r"version\s*=\s*\[?(?:[\w.]+:)?(\d[\w.]*)", _read(path)) for path in paths)
    return next((text for text in texts if text), "")


def run_tool(*command: str) -> str | None:
    """What a program prints; None where it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TOOL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _pairs(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    fields = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in fields if len(pair) == 2 and pair[1].isdigit()}


def _first_match(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
