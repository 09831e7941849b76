"""Where the cores are: which of the machine's CPUs share a core, and on which memory node each lies. Linux only."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.host import available_cores

_SYSFS = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class CpuPlace:
    """One CPU as the system counts them.

    Attributes:
        node: its memory node; 0 where the system tells none.
        core: the lowest CPU number of its core: CPUs of one core share its arithmetic.
        cpu: its number.
    """

    node: int
    core: int
    cpu: int


def cpu_places(cpus: Iterable[int] | None = None, sysfs: Path = _SYSFS) -> list[CpuPlace]:
    """The places of ``cpus`` (those this process may run on), by node, core and number."""
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((sysfs / "node").glob("node[0-9]*"))
        for cpu in _numbers(folder / "cpulist")
    }
    return sorted(CpuPlace(nodes.get(cpu, 0), _core_of(cpu, sysfs), cpu) for cpu in cpus)


def one_a_core(places: Iterable[CpuPlace]) -> list[CpuPlace]:
    """The first CPU of each core: a second thread on a core adds nothing to products that fill its vector units."""
    first: dict[int, CpuPlace] = {}
    for place in places:
        first.setdefault(place.core, place)
    return list(first.values())


def default_threads(ranks: int = 1) -> int:
    """Threads of one rank to compute with where nobody said: one a core, and no more than the cgroup lets run, divided
    among the ``ranks`` of this machine; at least 1."""
    return max(1, min(available_cores(), len(one_a_core(cpu_places()))) // ranks)


def _core_of(cpu: int, sysfs: Path) -> int:
    folder = sysfs / "cpu" / f"cpu{cpu}" / "topology"
    return min(_numbers(folder / "core_cpus_list") or _numbers(folder / "thread_siblings_list") or [cpu])


def _numbers(path: Path) -> list[int]:
    """The numbers of a list such as "0-3,8"; none where the file is not there."""
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return []
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
