"""What this machine has, read from the operating system. No torch, no driver library: it answers in milliseconds."""

import os
import platform
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from tokenspeed.recipes.devices import Accelerator, amd_devices, ascend_devices, nvidia_devices
from tokenspeed.recipes.host import available_cores, free_memory_bytes, total_memory_bytes
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import Hardware, Vendor

__all__ = ["Accelerator", "Machine", "described_machine", "detect_machine"]

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

_CDI_FOLDERS = ("etc/cdi", "var/run/cdi")
_DEVICE_FILES = {
    "nvidia": ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm"),
    "amd": ("kfd", "dri"),
    "npu": ("davinci[0-9]*", "davinci_manager", "devmm_svm", "hisi_hdc"),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine.

    Attributes:
        cores: those this process may use (affinity and the cgroup's quota).
        memory_bytes, free_bytes: as the cgroup and the system leave them.
        isa: the ISA_FEATURES it has.
        accelerators: what profiles choose by.
        described_by: "" for the machine at hand, else the name of the hardware description.
        architecture: "x86_64" or "aarch64"; "" where it is only described.
        cdi_kinds: kinds of devices with a specification by the Container Device Interface ("nvidia.com/gpu").
        device_files: of the accelerators, by path.
        device_groups: ids of the groups, other than root's, that those files belong to.
    """

    cores: int
    memory_bytes: int
    free_bytes: int
    isa: tuple[str, ...]
    accelerators: tuple[Accelerator, ...]
    described_by: str = ""
    architecture: str = ""
    cdi_kinds: tuple[str, ...] = ()
    device_files: tuple[str, ...] = ()
    device_groups: tuple[int, ...] = ()

    @property
    def summary(self) -> str:
        """One line for a person."""
        if self.described_by:
            return self.described_by + ": " + ", ".join(found.description for found in self.accelerators)
        devices = ", ".join(f"{found.count} x {found.description}" for found in self.accelerators) or "no accelerator"
        memory = f"{self.free_bytes / GIB:.1f} of {self.memory_bytes / GIB:.1f} GiB of memory free"
        return f"{self.cores} cores, {memory}, {devices}"

    def told_vendor(self, vendor: Vendor | None) -> "Machine":
        """The same machine where the operator says whose devices count: "cpu" leaves none.

        Devices that detection did not find are believed, as many as have a device file, or one.
        """
        if vendor is None:
            return self
        found = tuple(device for device in self.accelerators if device.vendor == vendor)
        if not found and vendor != "cpu":
            description = f"{vendor} device (as told, not detected)"
            found = (Accelerator(vendor=vendor, arch="", count=1, gb_per_device=0, description=description),)
        return replace(self, accelerators=found)


def detect_machine(root: Path = Path("/")) -> Machine:
    """Looks at the machine at hand; ``root`` holds the dev, etc, opt, proc and sys to read."""
    proc, cgroup = root / "proc", root / "sys" / "fs" / "cgroup"
    accelerators = (*nvidia_devices(root), *amd_devices(root), *ascend_devices(root))
    files = [file for vendor in {found.vendor for found in accelerators} for file in _device_files(root, vendor)]
    return Machine(
        cores=available_cores(cgroup, proc),
        memory_bytes=total_memory_bytes(cgroup, proc),
        free_bytes=free_memory_bytes(cgroup, proc),
        isa=_isa_features(proc),
        accelerators=accelerators,
        architecture=platform.machine(),
        cdi_kinds=_cdi_kinds(root) if accelerators else (),
        device_files=tuple(f"/{file.relative_to(root)}" for file in files),
        device_groups=tuple(sorted({group for file in files for group in _groups(file)} - {0})),
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


def _isa_features(proc: Path) -> tuple[str, ...]:
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return tuple(feature for feature in ISA_FEATURES if feature in flags)
    return ()


def _cdi_kinds(root: Path) -> tuple[str, ...]:
    """The kinds that the specifications declare: the one line of each that begins with ``kind``, in YAML or JSON."""
    kinds = set()
    for folder in _CDI_FOLDERS:
        for path in sorted([*(root / folder).glob("*.yaml"), *(root / folder).glob("*.json")]):
            try:
                lines = path.read_text(errors="replace").splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, value = line.strip(" ,{}").partition(":")
                if name.strip('" ') == "kind":
                    kinds.add(value.split(",")[0].strip("\"' "))
    return tuple(sorted(kinds))


def _device_files(root: Path, vendor: str) -> list[Path]:
    return [path for pattern in _DEVICE_FILES.get(vendor, ()) for path in sorted((root / "dev").glob(pattern))]


def _groups(file: Path) -> set[int]:
    """Of a device file; of a folder (/dev/dri) those of the render nodes in it."""
    files = sorted(file.glob("renderD*")) if file.is_dir() else [file]
    groups = set()
    for path in files:
        try:
            found = os.stat(path)
        except OSError:
            continue
        if stat.S_IMODE(found.st_mode) & stat.S_IWGRP:
            groups.add(found.st_gid)
    return groups
