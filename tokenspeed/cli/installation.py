"""What must be installed, and what must not, before an engine starts."""

import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tokenspeed.cli.records import ServerError
from tokenspeed.recipes.container import SHM_BYTES, SHM_BYTES_OF_RANKS
from tokenspeed.recipes.resolved import GIB

SHARED_MEMORY = Path("/dev/shm")

FOREIGN_DISTRIBUTIONS = ("tokenspeed", "tokenspeed-scheduler", "tokenspeed-kernel", "tokenspeed-mla", "tokenspeed-tui")
"""Distributions of another project that bring our import names."""


def refuse_foreign_distributions() -> None:
    """Raises ServerError where another project's distribution owns one of our import names."""
    for name in FOREIGN_DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        raise ServerError(
            f"the distribution {name} {found} is installed and brings an import name of ours; "
            f"remove it: pip uninstall {name}, then install this project again"
        )


def require_engine() -> None:
    """Raises ServerError where the base is installed without its engine."""
    absent = [name for name in ("torch", "tokenspeed_scheduler", "tokenspeed_kernel") if find_spec(name) is None]
    if absent:
        raise ServerError(
            f"the engine is not installed ({', '.join(absent)} missing): "
            "make run installs everything, docs/dependencies.md says how by hand"
        )


def refuse_small_shared_memory(ranks: int) -> None:
    """Raises ServerError where ranks would fail for want of shared memory: containers have 64 MB unless told."""
    if ranks < 2:
        return
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    if too_small(size, ranks):
        raise ServerError(
            f"{SHARED_MEMORY} has {size >> 20} MiB, too little for {ranks} ranks: {shared_memory_mend(ranks)}"
        )


def too_small(shared_bytes: int, ranks: int) -> bool:
    """Whether so many ranks cannot exchange tensors through so much shared memory."""
    return ranks > 1 and shared_bytes < ranks * SHM_BYTES // 4


def shared_memory_mend(ranks: int) -> str:
    """How to get enough of it."""
    wanted = (SHM_BYTES_OF_RANKS if ranks > 1 else SHM_BYTES) // GIB
    return f"containers: --shm-size {wanted}g; else, as root: mount -o remount,size={wanted}G {SHARED_MEMORY}"
