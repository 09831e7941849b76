"""Which part of a mapping is in memory: the KV cache is reserved at once and touched block by block."""

import ctypes
import mmap

_LIBC = ctypes.CDLL(None, use_errno=True)


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes of the mapping [address, address + nbytes) that are in memory, in whole pages.

    Raises OSError where the system cannot tell.
    """
    page = mmap.PAGESIZE
    start = address - address % page
    pages = -(-(address + nbytes - start) // page)
    states = (ctypes.c_ubyte * pages)()
    if _LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), states) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return min(nbytes, page * sum(state & 1 for state in bytes(states)))
