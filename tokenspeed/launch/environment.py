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
    """Returns the threads the engine computes with: as configured, else one for each core this process may use."""
    return config.threads or default_threads()


def thread_places(threads: int, places: Sequence[CpuPlace]) -> list[int]:
    """The CPU of each compute thread; none where they are better left to the system.

    Threads have places only where there is one for each core that this process may use: with fewer, two engines of one
    machine would choose the same.
    """
    cores = one_a_core(places)
    return [place.cpu for place in cores] if threads >= PINNED_THREADS and threads == len(cores) else []


def engine_environment(config: ResolvedConfig) -> dict[str, str]:
    """Returns what is added to the environment of an engine process; what the operator set already wins."""
    return _environment(compute_threads(config)) | config.env


def default_environment() -> dict[str, str]:
    """The same where the configuration says nothing of it."""
    return _environment(default_threads())


def _environment(threads: int) -> dict[str, str]:
    """Compute threads that wait must not spin for long: the API process and the event loop live on the same cores."""
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "false",
        PLACES_VARIABLE: ",".join(map(str, thread_places(threads, cpu_places()))),
    }
    return {name: value for name, value in defaults.items() if name not in os.environ}
