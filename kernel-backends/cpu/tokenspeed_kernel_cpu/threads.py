"""How many threads the kernels use.

They have a pool of their own (src/pool.hpp says why). Its size is torch's number of threads, taken whenever a linear or
an embedding is bound, so that ``torch.set_num_threads`` and OMP_NUM_THREADS mean here what they mean there.

TOKENSPEED_KERNEL_CPU_PLACES ("0,2,4,6") gives each thread a CPU of its own. The first is for the caller's thread, which
is not moved: torch starts its own threads from there, and they would all inherit the one place.
"""

import logging
import os

import torch

from tokenspeed_kernel_cpu import _native

logger = logging.getLogger("tokenspeed_kernel")

PLACES_VARIABLE = "TOKENSPEED_KERNEL_CPU_PLACES"


def set_num_threads(count: int) -> None:
    """Limits every kernel of this process to ``count`` threads, its caller's included.

    The next binding of a linear or an embedding takes torch's number again. Raises ValueError below 1.
    """
    if count < 1:
        raise ValueError(f"thread count {count}: a kernel needs at least 1")
    _native.set_thread_limit(count)


def num_threads() -> int:
    """The most threads a kernel uses."""
    return _native.thread_limit()


def follow_torch() -> None:
    """Takes torch's number of threads."""
    _native.set_thread_limit(torch.get_num_threads())


def read_places(text: str) -> list[int]:
    """The CPUs of "0,2,4"; ValueError, with what would be right, for anything else."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"{PLACES_VARIABLE} is {text!r}; use CPU numbers separated by commas, such as 0,2,4,6")
    return [int(part) for part in parts]


def take_places() -> None:
    """Puts the pool's threads where TOKENSPEED_KERNEL_CPU_PLACES says; raises ValueError where that is no list."""
    places = read_places(os.environ.get(PLACES_VARIABLE, ""))
    foreign = sorted(set(places) - os.sched_getaffinity(0)) if places and hasattr(os, "sched_getaffinity") else []
    if foreign:
        logger.warning(
            "%s names the CPUs %s, which this process may not use; their threads go where the system puts them",
            PLACES_VARIABLE,
            ", ".join(map(str, foreign)),
        )
    _native.set_thread_places(places[1:])
