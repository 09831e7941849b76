"""Anonymous memory in huge pages, for what is read at the speed of memory: weights and the cache."""

import mmap
from contextlib import suppress

import torch


def huge_zeros(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of zeros in anonymous memory for which huge pages are asked. Pages that are never touched cost
    nothing."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Where the kernel was built without it, small pages do the same, more slowly.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
