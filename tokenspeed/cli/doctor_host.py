"""The doctor's looks at the host: what is installed, memory, disk, limits, the port."""

import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tokenspeed.cli.environment import OUR_DISTRIBUTIONS, installed
from tokenspeed.cli.finding import Finding
from tokenspeed.cli.installation import (
    SHARED_MEMORY,
    refuse_foreign_distributions,
    shared_memory_mend,
    too_small,
)
from tokenspeed.cli.ports import claim_port
from tokenspeed.cli.records import ServerError
from tokenspeed.recipes.cache_folder import CACHE_VARIABLE, cache_directory
from tokenspeed.recipes.container import SHM_BYTES
from tokenspeed.recipes.features import weights_bytes
from tokenspeed.recipes.host import machine_memory_bytes
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.resolve import Resolution
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import HuggingFaceWeights
from tokenspeed.recipes.weights import hub_cache

MINIMUM_MEMORY = 2 * GIB
MINIMUM_DISK = 2 * GIB
MINIMUM_LOCKED = GIB
_COMPILE_S = 20.0
_DAY_S = 86400.0


def check_python() -> Finding:
    """Which Python runs; an older one than 3.11 cannot install this."""
    return Finding("ok", f"Python {platform.python_version()} at {sys.executable}")


def check_compiler() -> Finding:
    """A C++20 compiler; only a source checkout needs one."""
    path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    mend = "to build from source: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora); wheels need none"
    if path is None:
        return Finding("warn", "no C++ compiler", mend)
    program = "#include <concepts>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);\n"
    command = [path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    try:
        test = subprocess.run(command, input=program, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("warn", f"{path} does not work ({error})", mend)
    if test.returncode != 0:
        return Finding("warn", f"{path} does not know C++20", mend)
    return Finding("ok", f"C++20 compiler {path}")


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


def check_cores(machine: Machine) -> Finding:
    """Cores, and what the instruction set has."""
    return Finding("ok", f"{machine.cores} cores; instruction set: {' '.join(machine.isa) or 'baseline only'}")


def check_memory(machine: Machine, proc: Path = Path("/proc")) -> Finding:
    """Memory for a small model and its cache, and whether a cgroup bounds it."""
    found = f"{machine.free_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB of memory free"
    whole = machine_memory_bytes(proc)
    if machine.memory_bytes < whole:
        found += f" (a cgroup allows that much of {whole / GIB:.1f} GiB)"
    if machine.free_bytes < MINIMUM_MEMORY:
        return Finding("fail", found, "free memory, or raise the container's limit: the default model needs 2 GiB")
    return Finding("ok", found)


def check_huge_pages(root: Path = Path("/")) -> Finding:
    """Transparent huge pages: weights are mapped and read in place, half as fast again with them."""
    switch = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        text = switch.read_text()
    except OSError:
        return Finding("ok", "transparent huge pages: the kernel has no switch for them")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        mend = f"as root: echo madvise > {switch} (reading weights is up to a third slower without)"
        return Finding("warn", "transparent huge pages: never", mend)
    return Finding("ok", f"transparent huge pages: {chosen}")


def check_locked_memory(machine: Machine) -> Finding:
    """How much memory may be pinned; devices transfer from pinned memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "locked memory: unlimited" if limit == resource.RLIM_INFINITY else f"locked memory: {limit >> 10} KiB"
    if machine.accelerators and limit != resource.RLIM_INFINITY and limit < MINIMUM_LOCKED:
        mend = "ulimit -l unlimited (for good: memlock in /etc/security/limits.conf; containers: --ulimit memlock=-1)"
        return Finding("warn", found, mend)
    return Finding("ok", found)


def check_shared_memory(resolution: Resolution | None, shared: Path = SHARED_MEMORY) -> Finding:
    """/dev/shm, through which ranks exchange tensors."""
    ranks = resolution.keys.parallel.tp if resolution is not None else 1
    mend = shared_memory_mend(ranks)
    if not shared.is_dir():
        return Finding("fail" if ranks > 1 else "warn", "no /dev/shm", mend)
    size = shutil.disk_usage(shared).total
    found = f"/dev/shm has {size / GIB:.2f} GiB"
    if too_small(size, ranks):
        return Finding("fail", f"{found}, too little for {ranks} ranks", mend)
    if size < SHM_BYTES // 2:
        return Finding("warn", found, mend)
    return Finding("ok", found)


def check_disk(resolution: Resolution | None) -> Finding:
    """Disk for the weights, in the folder they go to."""
    folder, variable, needed, what = cache_directory(), CACHE_VARIABLE, MINIMUM_DISK, "weights"
    if resolution is not None and not resolution.located.present:
        needed, what = weights_bytes(resolution.weights) or MINIMUM_DISK, f"the weights of {resolution.name}"
        if isinstance(resolution.weights, HuggingFaceWeights):
            folder, variable = hub_cache(), "HF_HOME"
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    found = f"{free / GIB:.1f} GiB of disk free for {what} in {folder}"
    if free < needed:
        return Finding("fail", f"{found}, {needed / GIB:.1f} GiB needed", f"set {variable} to a folder with room")
    return Finding("ok", found)


def check_caches() -> Finding:
    """The folders that downloads and compiled kernels go to can be written."""
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    folders = {CACHE_VARIABLE: cache_directory(), "HF_HOME": hub_cache(), "TRITON_CACHE_DIR": triton}
    closed = {
        variable: folder
        for variable, folder in folders.items()
        if not os.access(next(path for path in (folder, *folder.parents) if path.exists()), os.W_OK | os.X_OK)
    }
    if closed:
        named = ", ".join(str(folder) for folder in closed.values())
        return Finding(
            "fail", f"caches that cannot be written: {named}", f"set {', '.join(closed)} to a folder of yours"
        )
    return Finding("ok", f"caches can be written: {', '.join(str(folder) for folder in folders.values())}")


def check_clock() -> Finding:
    """The clock is not behind this very program: certificates would be refused, and every download with them."""
    behind = Path(__file__).stat().st_mtime - time.time()
    if behind > _DAY_S:
        return Finding("warn", f"the clock is at least {behind / _DAY_S:.0f} days behind", "timedatectl set-ntp true")
    return Finding("ok", f"the clock says {time.strftime('%Y-%m-%d %H:%M:%S %z')}")


def check_port(port: int) -> Finding:
    """The port is free."""
    try:
        claim_port("127.0.0.1", port)
    except ServerError as error:
        return Finding("warn", f"port {port}", str(error))
    return Finding("ok", f"port {port} is free")
