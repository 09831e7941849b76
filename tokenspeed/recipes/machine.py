"""What this machine has, read from the operating system. No torch, no driver library: it answers in milliseconds."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.host import available_cores, free_memory_bytes, total_memory_bytes
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import Hardware, Vendor

ISA_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
"""Features of the instruction set that a kernel may ask for, by their names in /proc/cpuinfo."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Devices of one kind. ``arch`` "" and ``gb_per_device`` 0 where the driver does not tell."""

    vendor: Vendor
    arch: str
    count: int
    gb_per_device: int
    description: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine.

    Attributes:
        cores: those this process may use (affinity and the cgroup's quota).
        memory_bytes, free_bytes: as the cgroup and the system leave them.
        isa: the ISA_FEATURES it has.
        accelerators: what profiles choose by.
        described_by: "" for the machine at hand, else the name of the hardware description.
    """

    cores: int
    memory_bytes: int
    free_bytes: int
    isa: tuple[str, ...]
    accelerators: tuple[Accelerator, ...]
    described_by: str = ""

    @property
    def summary(self) -> str:
        """One line for a person."""
        if self.described_by:
            return self.described_by + ": " + ", ".join(found.description for found in self.accelerators)
        devices = ", ".join(f"{found.count} x {found.description}" for found in self.accelerators) or "no accelerator"
        memory = f"{self.free_bytes / GIB:.1f} of {self.memory_bytes / GIB:.1f} GiB of memory free"
        return f"{self.cores} cores, {memory}, {devices}"


def detect_machine() -> Machine:
    """Looks at the machine at hand."""
    return Machine(
        cores=available_cores(),
        memory_bytes=total_memory_bytes(),
        free_bytes=free_memory_bytes(),
        isa=_isa_features(),
        accelerators=(*_nvidia(), *_amd(), *_ascend()),
    )


def described_machine(hardware: Hardware) -> Machine:
    """The machine of a hardware description, for a plan made elsewhere; its memory is that of the host: unknown, 0."""
    found = Accelerator(
        vendor=hardware.vendor,
        arch=hardware.arch,
        count=hardware.devices,
        gb_per_device=hardware.gb_per_device,
        description=hardware.description,
    )
    accelerators = () if hardware.vendor == "cpu" else (found,)
    memory = hardware.gb_per_device * GIB if hardware.vendor == "cpu" else 0
    return Machine(
        cores=0, memory_bytes=memory, free_bytes=memory, isa=(), accelerators=accelerators, described_by=hardware.name
    )


def _isa_features() -> tuple[str, ...]:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return tuple(feature for feature in ISA_FEATURES if feature in flags)
    return ()


def _nvidia() -> list[Accelerator]:
    if not Path("/dev/nvidiactl").exists():
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return [
            Accelerator(vendor="nvidia", arch="", count=1, gb_per_device=0, description="NVIDIA device (driver silent)")
        ]
    kinds: dict[tuple[str, str, str], int] = {}
    for row in rows:
        name, memory, capability = (part.strip() for part in row.split(","))
        kinds[name, memory, capability] = kinds.get((name, memory, capability), 0) + 1
    return [
        Accelerator(
            vendor="nvidia",
            arch="sm" + capability.replace(".", ""),
            count=count,
            gb_per_device=int(memory) // 1024,
            description=name,
        )
        for (name, memory, capability), count in kinds.items()
    ]


def _amd() -> list[Accelerator]:
    kinds: dict[tuple[str, int], int] = {}
    for node in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*")):
        properties = dict(line.split() for line in _read(node / "properties").splitlines() if len(line.split()) == 2)
        version = int(properties.get("gfx_target_version", 0))
        if version == 0:  # a CPU node
            continue
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        banks = [_read(bank / "properties") for bank in node.glob("mem_banks/*")]
        sizes = [
            int(line.split()[1]) for bank in banks for line in bank.splitlines() if line.startswith("size_in_bytes")
        ]
        key = (arch, sum(sizes) // GIB)
        kinds[key] = kinds.get(key, 0) + 1
    return [
        Accelerator(vendor="amd", arch=arch, count=count, gb_per_device=size, description=f"AMD {arch}")
        for (arch, size), count in kinds.items()
    ]


def _ascend() -> list[Accelerator]:
    count = len(list(Path("/dev").glob("davinci[0-9]*")))
    if count == 0:
        return []
    return [Accelerator(vendor="npu", arch="", count=count, gb_per_device=0, description="Ascend NPU")]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
