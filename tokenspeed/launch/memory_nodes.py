"""Spreads an engine's memory over the nodes that its threads run on.

Every thread reads whatever rows of the weights it happens to take, so no node is theirs. Left alone, the system puts a
page where the thread ran that touched it first, which was one of the loader: one node would serve all the others.
"""

import ctypes
import logging
import platform
from collections.abc import Iterable

logger = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_INTERLEAVE = 3
_WORD_BITS = 64


def node_mask(nodes: Iterable[int]) -> int:
    """One bit a node."""
    mask = 0
    for node in nodes:
        mask |= 1 << node
    return mask


def interleave(nodes: Iterable[int]) -> bool:
    """Has new pages of this thread, and of those it starts, taken from ``nodes`` in turn; False where it cannot be."""
    mask = node_mask(nodes)
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = max(1, -(-mask.bit_length() // _WORD_BITS))
    bits = (ctypes.c_uint64 * words)(*((mask >> (_WORD_BITS * word)) & (2**_WORD_BITS - 1) for word in range(words)))
    # The kernel reads one bit less than it is told.
    failed = ctypes.CDLL(None, use_errno=True).syscall(number, _INTERLEAVE, bits, words * _WORD_BITS + 1)
    if failed:
        logger.warning("memory is not spread over the nodes: set_mempolicy failed with error %d", ctypes.get_errno())
    return not failed


def spread_memory(nodes: Iterable[int]) -> None:
    """Interleaves where there are several nodes; a machine with one is left as it is."""
    several = sorted(set(nodes))
    if len(several) > 1 and interleave(several):
        logger.info("memory is spread over the nodes %s", ", ".join(map(str, several)))
