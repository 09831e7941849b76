"""The engine process's environment: what must be set before its libraries are loaded."""

import os

from tokenspeed.recipes.host import available_cores
from tokenspeed.recipes.resolved import ResolvedConfig


def compute_threads(config: ResolvedConfig) -> int:
    """Returns the threads the engine computes with: as configured, else the cores this process may use."""
    return config.threads or available_cores()


def engine_environment(config: ResolvedConfig) -> dict[str, str]:
    """Returns what is added to the environment of an engine process; what the operator set already wins.

    Compute threads that wait must not spin for long: the API process and the event loop live on the same cores.
    """
    threads = str(compute_threads(config))
    defaults = {
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {name: value for name, value in defaults.items() if name not in os.environ} | config.env
