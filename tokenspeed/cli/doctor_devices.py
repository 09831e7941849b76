"""The doctor's looks at accelerators: driver, permission, and how containers get at them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tokenspeed.cli.containers import PROGRAMS, engine_state, has_image, image_labels
from tokenspeed.cli.finding import Finding
from tokenspeed.recipes.catalogue import hardware_names, load_hardware
from tokenspeed.recipes.container import image_of
from tokenspeed.recipes.container_command import ContainerEngine
from tokenspeed.recipes.container_devices import CDI_KINDS
from tokenspeed.recipes.devices import Accelerator, cuda_version
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.resolve import Resolution

DRIVER_LABEL = "tokenspeed.minimum-driver"
_CDI_COMMANDS = {
    "nvidia": "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    "amd": "amd-ctk cdi generate --output=/etc/cdi/amd.json",
}


def check_accelerators(machine: Machine) -> Iterator[Finding]:
    """Accelerators; this version does not use them."""
    if not machine.accelerators:
        yield Finding("ok", "no accelerator: models run on the CPU")
        return
    for kind in machine.accelerators:
        size = f", {kind.gb_per_device} GiB each" if kind.gb_per_device else ""
        found = f"{kind.count} x {kind.description} ({kind.arch or 'architecture not told'}{size})"
        yield Finding("warn", found, "this version computes on the CPU; profiles for devices can be planned, not run")


def check_driver(machine: Machine, resolution: Resolution | None) -> Iterator[Finding]:
    """The driver answers, and is as new as the vendor's image, or else the hardware's description, asks for."""
    for kind in machine.accelerators:
        runtime = kind.runtime or (cuda_version() if kind.vendor == "nvidia" else "")
        told = f"{kind.vendor} driver {kind.driver or 'of unknown version'}" + (
            f", runtime {runtime}" if runtime else ""
        )
        if not kind.driver or not kind.arch:
            tool = {"nvidia": "nvidia-smi", "amd": "rocm-smi", "npu": "npu-smi info"}.get(kind.vendor, "its tool")
            yield Finding("warn", f"{told}: it does not say everything", f"see what the driver says: {tool}")
            continue
        minimum, source = _minimum_driver(kind, resolution)
        if minimum and version_key(kind.driver) < version_key(minimum):
            yield Finding(
                "fail", f"{told}, {source} needs {minimum}", f"install driver {minimum} or newer, then reboot"
            )
        else:
            yield Finding("ok", told + (f" ({source} needs {minimum})" if minimum else ""))


def _minimum_driver(kind: Accelerator, resolution: Resolution | None) -> tuple[str, str]:
    image = image_of(resolution) if resolution is not None else f"tokenspeed-{kind.vendor}"
    for program in PROGRAMS:
        label = image_labels(ContainerEngine(program=program), image).get(DRIVER_LABEL, "")
        if label and label[0].isdigit():
            return label, f"image {image}"
    for hardware in map(load_hardware, hardware_names()):
        if hardware.vendor == kind.vendor and hardware.arch == kind.arch and hardware.minimum_driver:
            return hardware.minimum_driver, hardware.description
    return "", ""


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare by."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def check_device_files(machine: Machine, root: Path = Path("/")) -> Iterator[Finding]:
    """The device files can be opened by this user."""
    if not machine.device_files:
        return
    paths = [root / file.lstrip("/") for file in machine.device_files]
    files = [node for path in paths for node in (sorted(path.glob("renderD*")) if path.is_dir() else [path])]
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if not closed:
        yield Finding("ok", f"{len(files)} device files can be opened")
        return
    groups = " ".join(f"-G {group}" for group in machine.device_groups)
    mend = f"as root: usermod -a {groups} $USER, then log in again" if groups else "run as a user that may open them"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        mend = "give the container the devices' groups: " + " ".join(
            f"--group-add {group}" for group in machine.device_groups
        )
    yield Finding("fail", f"may not be opened by uid {os.getuid()}: {', '.join(map(str, closed))}", mend)


def check_containers(machine: Machine, resolution: Resolution | None) -> Iterator[Finding]:
    """Container engines, the vendor's image, and how devices get into containers."""
    able = []
    for program in PROGRAMS:
        state = engine_state(program)
        if state.engine is not None:
            able.append(state.engine)
            rootless = ", rootless" if state.engine.rootless else ""
            yield Finding("ok", f"{program} {state.engine.version}{rootless}")
        elif state.reason != "not installed":
            yield Finding("warn", f"{program}: {state.reason}", _engine_mend(program))
    if not able:
        yield Finding("ok", "no container engine works: models run natively")
        return
    vendors = sorted({found.vendor for found in machine.accelerators}) or ["cpu"]
    images = [image_of(resolution)] if resolution is not None else [f"tokenspeed-{vendor}" for vendor in vendors]
    for image in images:
        holder = next((engine.program for engine in able if has_image(engine, image)), None)
        mend = "" if holder else f"to run in a container: make image VENDOR={vendors[0]}; natively nothing is missing"
        yield Finding("ok", f"image {image}: {'in ' + holder if holder else 'not here'}", mend)
    for vendor, command in _CDI_COMMANDS.items():
        if vendor in vendors:
            present = CDI_KINDS[vendor] in machine.cdi_kinds
            found = f"CDI specification of {CDI_KINDS[vendor]}: {'there' if present else 'none'}"
            yield Finding("ok" if present else "warn", found, "" if present else f"as root: {command}")


def _engine_mend(program: str) -> str:
    if program == "docker":
        return "systemctl start docker, and join its group: usermod -a -G docker $USER; or DOCKER_HOST names another"
    return "see what it says: podman info"
