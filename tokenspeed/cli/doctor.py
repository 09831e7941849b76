"""``doctor``: looks for what would keep a model from running here; each finding has the line that mends it."""

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenspeed.cli.environment import OUR_DISTRIBUTIONS, installed
from tokenspeed.cli.output import say
from tokenspeed.cli.servers import ServerError
from tokenspeed.cli.start import claim_port, refuse_foreign_distributions
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.weights import CACHE_VARIABLE, cache_directory

MINIMUM_MEMORY = 2 * GIB
MINIMUM_DISK = 2 * GIB
MINIMUM_SHARED_MEMORY = 64 << 20


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``mend`` is the line that helps, "" where all is well."""

    level: Literal["ok", "warn", "fail"]
    what: str
    mend: str = ""


def examine(port: int) -> int:
    """Prints all findings; 2 where one of them keeps a model from running."""
    machine = detect_machine()
    findings = [
        check_python(),
        check_compiler(),
        check_cores(machine),
        check_memory(machine),
        check_accelerators(machine),
        check_disk(),
        check_shared_memory(),
        check_packages(),
        check_port(port),
    ]
    for finding in findings:
        say(f"{finding.level:<4}  {finding.what}" + (f"\n      -> {finding.mend}" if finding.mend else ""))
    return 2 if any(finding.level == "fail" for finding in findings) else 0


def check_python() -> Finding:
    """Which Python runs; an older one than 3.11 cannot install this."""
    return Finding("ok", f"Python {platform.python_version()} at {sys.executable}")


def check_compiler() -> Finding:
    """A C++20 compiler; only a source checkout needs one."""
    path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    mend = "to build from source: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora); wheels need none"
    if path is None:
        return Finding("warn", "no C++ compiler", mend)
    test = subprocess.run(
        [path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input="#include <concepts>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if test.returncode != 0:
        return Finding("warn", f"{path} does not know C++20", mend)
    return Finding("ok", f"C++20 compiler {path}")


def check_cores(machine: Machine) -> Finding:
    """Cores, and what the instruction set has."""
    return Finding("ok", f"{machine.cores} cores; instruction set: {' '.join(machine.isa) or 'baseline only'}")


def check_memory(machine: Machine) -> Finding:
    """Memory for a small model and its cache."""
    found = f"{machine.free_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB of memory free"
    if machine.free_bytes < MINIMUM_MEMORY:
        return Finding("fail", found, "free memory, or raise the container's limit: the default model needs 2 GiB")
    return Finding("ok", found)


def check_accelerators(machine: Machine) -> Finding:
    """Accelerators; this version does not use them."""
    if not machine.accelerators:
        return Finding("ok", "no accelerator: models run on the CPU")
    found = ", ".join(f"{kind.count} x {kind.description}" for kind in machine.accelerators)
    return Finding("warn", found, "this version computes on the CPU; profiles for devices can be planned, not run")


def check_disk() -> Finding:
    """Disk for the weights, in the folder they go to."""
    folder = cache_directory()
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(present).free
    found = f"{free / GIB:.1f} GiB of disk free for weights in {folder}"
    if free < MINIMUM_DISK:
        return Finding("fail", found, f"set {CACHE_VARIABLE} to a folder with room")
    return Finding("ok", found)


def check_shared_memory() -> Finding:
    """/dev/shm, which PyTorch and the processes share."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding("warn", "no /dev/shm", "mount a tmpfs there (containers: --shm-size 1g)")
    size = shutil.disk_usage(shared).total
    found = f"/dev/shm has {size / GIB:.2f} GiB"
    if size < MINIMUM_SHARED_MEMORY:
        return Finding("warn", found, "containers: --shm-size 1g")
    return Finding("ok", found)


def check_packages() -> Finding:
    """Our distributions are installed, and nobody else's own our import names."""
    try:
        refuse_foreign_distributions()
    except ServerError as error:
        return Finding("fail", "a foreign distribution", str(error))
    absent = [name for name in (*OUR_DISTRIBUTIONS, "torch") if installed(name) is None]
    if absent:
        mend = "make run installs everything; by hand: pip install --no-index -e . (and the folders of the others)"
        return Finding("fail" if "torch" in absent else "warn", f"not installed: {', '.join(absent)}", mend)
    return Finding("ok", f"{len(OUR_DISTRIBUTIONS)} distributions of ours, torch {installed('torch')}")


def check_port(port: int) -> Finding:
    """The port is free."""
    try:
        claim_port("127.0.0.1", port)
    except ServerError as error:
        return Finding("warn", f"port {port}", str(error))
    return Finding("ok", f"port {port} is free")
