"""The host pool's memory: blocks as they are in the device arena, byte for byte, and the copies between both.

Same parents, same block ids: id = parent * children_per_parent + child, parent 0 null. The scheduler owns every block;
what a copy or a storage operation touches is pinned by the scheduler until it was told that it ended.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.cache_arena import ArenaLayout, CacheArena
from tokenspeed.device.placement import Placement
from tokenspeed.device.residency import untouched_bytes

logger = logging.getLogger(__name__)

Ints = NDArray[np.int32]


class HostArena:
    """``num_parents`` usable parents and the null parent in host memory, pinned where there is a device to copy to.

    Pageable memory is only touched when a block is first written.
    """

    def __init__(self, placement: Placement, layout: ArenaLayout, num_parents: int) -> None:
        if num_parents < 1:
            raise ValueError(f"a host pool of {num_parents} parents cannot hold a single block; raise kv.host_bytes")
        self.layout = layout
        self.num_parents = num_parents
        self.nbytes = (num_parents + 1) * layout.parent_bytes
        self._bytes = placement.host_zeros(self.nbytes)
        # Storage threads see the same memory through numpy: no tensor operation runs outside the forward thread.
        self._arrays: list[NDArray[np.uint8]] = [self.blocks(group).numpy() for group in range(len(layout.facts))]

    @property
    def untouched_bytes(self) -> int | None:
        """Bytes that nothing was written to yet, so that they are reserved and not in memory; None: not known."""
        return untouched_bytes(self._bytes.data_ptr(), self.nbytes)

    def blocks(self, group: int) -> torch.Tensor:
        """uint8 [blocks, bytes of a block] of the group, a view."""
        return self._bytes.view(-1, self.layout.block_bytes[group])

    def buffer(self, group: int, block: int) -> memoryview:
        """The bytes of one block, writable, for whoever reads or writes files. IndexError for a block there is not."""
        first, count = self.layout.facts[group].children_per_parent, self._arrays[group].shape[0]
        if not first <= block < count:
            raise IndexError(f"host block {block} of group {group}: there are {first} to {count - 1}")
        return memoryview(self._arrays[group][block])

    def save(self, arena: CacheArena, group: Ints, source: Ints, target: Ints) -> NDArray[np.uint8] | None:
        """Copies device blocks ``source`` to host blocks ``target``, all int32 [n]; to or from a device, without
        waiting.

        Returns uint8 [n], 0 for the blocks whose copy failed (the cause is logged), or None where none did.
        """
        return self._copy(group, source, target, lambda index: (arena.blocks(index), self.blocks(index)))

    def load(self, arena: CacheArena, group: Ints, source: Ints, target: Ints) -> NDArray[np.uint8] | None:
        """Copies host blocks ``source`` to device blocks ``target``; else as ``save``."""
        return self._copy(group, source, target, lambda index: (self.blocks(index), arena.blocks(index)))

    def _copy(
        self, group: Ints, source: Ints, target: Ints, views: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    ) -> NDArray[np.uint8] | None:
        succeeded: NDArray[np.uint8] | None = None
        for first, last in _runs(group, source, target):
            try:
                index, count = int(group[first]), last - first
                null = self.layout.facts[index].children_per_parent
                from_blocks, to_blocks = views(index)
                _stretch(to_blocks, int(target[first]), count, null).copy_(
                    _stretch(from_blocks, int(source[first]), count, null), non_blocking=True
                )
            except Exception:
                logger.exception("a copy of %d blocks between device and host failed", last - first)
                succeeded = np.ones(group.size, np.uint8) if succeeded is None else succeeded
                succeeded[first:last] = 0
        return succeeded


def _runs(group: Ints, source: Ints, target: Ints) -> Iterator[tuple[int, int]]:
    """Stretches [first, last) of one group in which both ids rise by one: each is one copy."""
    if not group.size:
        return
    go_on = (np.diff(group) == 0) & (np.diff(source) == 1) & (np.diff(target) == 1)
    bounds = [0, *(np.flatnonzero(~go_on) + 1).tolist(), group.size]
    yield from pairwise(bounds)


def _stretch(blocks: torch.Tensor, first: int, count: int, null: int) -> torch.Tensor:
    if first < null or first + count > blocks.shape[0]:
        raise IndexError(f"blocks {first} to {first + count - 1} of {null} to {blocks.shape[0] - 1}")
    return blocks[first : first + count]
