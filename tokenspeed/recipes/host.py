"""What the machine leaves this process: memory and cores, cgroups included. Linux only; elsewhere the plain figures."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def free_memory_bytes(root: Path = _CGROUP_ROOT, proc: Path = Path("/proc")) -> int:
    """Bytes this process can still take: the least of what the machine has and what each enclosing cgroup leaves.

    Reclaimable file pages count as free.
    """
    figures = [_machine_available(proc)]
    for limit_path, usage_path, stat_path, stat_key in _memory_files(root, proc):
        limit, usage = _integer(limit_path), _integer(usage_path)
        if limit is not None and usage is not None:
            figures.append(max(0, limit - usage + _statistic(stat_path, stat_key)))
    return min(figures)


def total_memory_bytes(root: Path = _CGROUP_ROOT, proc: Path = Path("/proc")) -> int:
    """Bytes this process may ever take: the least of what the machine has and what each enclosing cgroup allows."""
    limits = [_integer(limit_path) for limit_path, _, _, _ in _memory_files(root, proc)]
    return min([machine_memory_bytes(proc), *(limit for limit in limits if limit is not None)])


def available_cores(root: Path = _CGROUP_ROOT, proc: Path = Path("/proc")) -> int:
    """Cores this process may use: its affinity, bounded by the CPU quota of the cgroups around it; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(root, proc, controller=""):
        fields = _text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit() and int(fields[1]) > 0:
            cores = min(cores, max(1, int(fields[0]) // int(fields[1])))
    for folder in _cgroup_folders(root / "cpu", proc, controller="cpu"):
        quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
        if quota is not None and period is not None and quota > 0 and period > 0:
            cores = min(cores, max(1, quota // period))
    return cores


def machine_memory_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes the whole machine has, whatever cgroups allow."""
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_available(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _memory_files(root: Path, proc: Path) -> Iterator[tuple[Path, Path, Path, str]]:
    for folder in _cgroup_folders(root, proc, controller=""):
        yield folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file"
    for folder in _cgroup_folders(root / "memory", proc, controller="memory"):
        yield (
            folder / "memory.limit_in_bytes",
            folder / "memory.usage_in_bytes",
            folder / "memory.stat",
            "total_inactive_file",
        )


def _cgroup_folders(root: Path, proc: Path, *, controller: str) -> Iterator[Path]:
    """This process's cgroup folder and all above it, up to ``root``; controller "" is the unified hierarchy.

    Inside a container the path may name a folder of the host; then ``root`` alone is what can be seen.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (controller or controllers == ""):
            parts = [part for part in path.split("/") if part]
            if ".." not in parts:
                yield from (root.joinpath(*parts[:depth]) for depth in range(len(parts), 0, -1))
    yield root


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace")
    except OSError:
        return ""


def _integer(path: Path) -> int | None:
    """The file's integer; None where it is missing or says "max"."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _statistic(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
