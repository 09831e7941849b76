"""Which part of a mapping is in memory: the KV cache is reserved at once and touched block by block."""

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None)
_BYTES = ctypes.POINTER(ctypes.c_ubyte)


_STEP = 64 << 30
"""Bytes asked about at a time: the answer is a byte a page."""


def untouched_bytes(address: int, nbytes: int) -> int | None:
    """Bytes of the mapping [address, address + nbytes) that are not in memory, to a page; None where the system does
    not tell (no mincore, or a sandbox that forbids it): a figure for a report must not keep an engine from starting."""
    page = mmap.PAGESIZE
    start, end, resident = address - address % page, address + nbytes, 0
    for begin in range(start, end, _STEP):
        pages = -(-(min(begin + _STEP, end) - begin) // page)
        states = np.empty(pages, dtype=np.uint8)
        try:
            failed = _LIBC.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * page), states.ctypes.data_as(_BYTES))
        except AttributeError:
            return None
        if failed:
            return None
        resident += page * int(np.count_nonzero(states & 1))
    return max(0, nbytes - resident)
