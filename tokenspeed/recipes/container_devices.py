"""How a vendor's devices get into a container: by name (CDI) where the machine has a specification, else by file."""

from dataclasses import dataclass

from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.schema import Vendor

CDI_KINDS: dict[str, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "npu": "huawei.com/npu"}
"""The kind under which each vendor's generator writes its devices."""

_ASCEND_DRIVER = (
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
)
"""What a container takes from the host's Ascend driver: its libraries and its tool."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """``source`` is a named volume, or an absolute path of the host; ``target`` a folder of the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class DeviceAccess:
    """Fields as in ContainerSpec."""

    cdi: tuple[str, ...] = ()
    gpus: str = ""
    devices: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()


def device_access(vendor: Vendor, machine: Machine) -> DeviceAccess:
    """Access to all devices of ``vendor``.

    A described machine is taken to be set up as its vendor advises: NVIDIA by CDI, AMD and Ascend by device files.
    """
    if vendor == "cpu":
        return DeviceAccess()
    kind = CDI_KINDS[vendor]
    if kind in machine.cdi_kinds or (vendor == "nvidia" and machine.described_by):
        return DeviceAccess(cdi=(f"{kind}=all",))
    if vendor == "nvidia":
        return DeviceAccess(gpus="all")
    if vendor == "amd":
        devices = machine.device_files or ("/dev/kfd", "/dev/dri")
        return DeviceAccess(devices=devices, groups=_groups(machine) or ("video", "render"))
    return DeviceAccess(
        devices=machine.device_files or _ascend_files(machine),
        groups=_groups(machine),
        volumes=tuple(Volume(source=path, target=path, read_only=True) for path in _ASCEND_DRIVER),
    )


def _groups(machine: Machine) -> tuple[str, ...]:
    return tuple(str(group) for group in machine.device_groups)


def _ascend_files(machine: Machine) -> tuple[str, ...]:
    count = sum(found.count for found in machine.accelerators if found.vendor == "npu")
    return (
        *(f"/dev/davinci{index}" for index in range(count)),
        "/dev/davinci_manager",
        "/dev/devmm_svm",
        "/dev/hisi_hdc",
    )
