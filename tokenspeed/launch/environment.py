"""The engine process's environment: what must be set before its libraries are loaded."""

import os
from collections.abc import Sequence

from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.recipes.topology import CpuPlace, cpu_places, default_threads, one_a_core

PLACES_VARIABLE = "TOKENSPEED_KERNEL_CPU_PLACES"
"""The CPUs for the kernels' threads, one each, separated by commas; empty or not set: wherever the system puts them."""

PINNED_THREADS = 4
"""From here on threads have places. Below, the loop and the API process need the very cores that would be taken."""


def compute_threads(config: ResolvedConfig) -> int:
    """Returns the threads a rank computes with: as configured, else one for each core this process may use, divided
    among the ranks."""
    return config.threads or default_threads(config.parallel.tp)


def thread_places(threads: int, places: Sequence[CpuPlace], *, rank: int = 0, ranks: int = 1) -> list[int]:
    """The CPU of each compute thread of a rank; none where they are better left to the system.

    Threads have places only where there is one for each core that this process may use: with fewer, two engines of one
    machine would choose the same.
    """
    cores = one_a_core(places)
    if threads < PINNED_THREADS or threads != len(cores) // ranks:
        return []
    return [place.cpu for place in cores[rank * threads : (rank + 1) * threads]]


def engine_environment(config: ResolvedConfig, rank: int = 0) -> dict[str, str]:
    """Returns what is added to the environment of a rank's process; what the operator set already wins."""
    return _environment(compute_threads(config), rank, config.parallel.tp) | config.env


def default_environment() -> dict[str, str]:
    """The same where the configuration says nothing of it."""
    return _environment(default_threads())


def _environment(threads: int, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """Compute threads that wait must not spin for long: the API process and the event loop live on the same cores."""
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "false",
        PLACES_VARIABLE: ",".join(map(str, thread_places(threads, cpu_places(), rank=rank, ranks=ranks))),
    }
    if ranks > 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # all are on this machine, whatever its name resolves to
    return {name: value for name, value in defaults.items() if name not in os.environ}
