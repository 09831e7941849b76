"""The KV cache's memory: one byte arena, and strided views of it for each layer.

Layout: [parent][child][layer][field][kv_head][token][dim]. A parent is a size that every group's blocks divide,
padded where that takes little, so any parent can serve any group; parent 0 is null: padding is written there and nobody
reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.placement import Placement
from tokenspeed.device.residency import untouched_bytes
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.recipes.capacity import GroupFacts, share_parents
from tokenspeed_kernel.ops.kv_cache import row_dtype


def fold(spec: CacheGroupSpec, *, bytes_per_block: int, children_per_parent: int) -> GroupFacts:
    """Folds a declaration into what the scheduler takes: tokens and blocks.

    Beyond this line pages and row geometry do not exist. A state group has no rows, so its blocks cover no tokens.
    """
    return GroupFacts(
        group_id=spec.group_id,
        kind=spec.kind,
        block_granularity=0 if spec.kind == "state" else spec.block_granularity,
        children_per_parent=children_per_parent,
        bytes_per_block=bytes_per_block,
        sliding_window_tokens=spec.sliding_window_tokens or 0,
        checkpoint_granularity=spec.checkpoint_granularity or 0,
    )


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes in bytes that follow from the groups and the dtype; parents are counted with the null parent.

    Attributes:
        groups: the declarations, in plan order.
        dtype: of the cached values, where a group does not say otherwise.
        block_bytes: of one block, for each group, with what it is padded by.
        parent_bytes: of one parent.
        facts: the groups as the scheduler takes them.
    """

    groups: tuple[CacheGroupSpec, ...]
    dtype: torch.dtype
    block_bytes: tuple[int, ...]
    parent_bytes: int
    facts: tuple[GroupFacts, ...]

    @staticmethod
    def of(groups: Sequence[CacheGroupSpec], dtype: torch.dtype) -> "ArenaLayout":
        """Plans the layout of ``groups``; ValueError for no group or a repeated group id."""
        if not groups or len({group.group_id for group in groups}) != len(groups):
            raise ValueError(f"cache groups {[group.group_id for group in groups]}: at least one, with unique ids")
        sizes = [group.elements_per_block * dtype_of(group, dtype).itemsize for group in groups]
        block_bytes, parent_bytes = share_parents(sizes)
        facts = tuple(
            fold(group, bytes_per_block=size, children_per_parent=parent_bytes // size)
            for group, size in zip(groups, block_bytes, strict=True)
        )
        return ArenaLayout(tuple(groups), dtype, block_bytes, parent_bytes, facts)


def dtype_of(group: CacheGroupSpec, kv_dtype: torch.dtype) -> torch.dtype:
    """What the group's values are stored as, where the cache is ``kv_dtype``."""
    if group.dtype == "kv_16":
        return row_dtype(kv_dtype)
    return kv_dtype if group.dtype == "kv" else torch.float32


def _widest(nbytes: int) -> torch.dtype:
    """What a block of so many bytes is whole elements of, as wide as may be: whoever moves blocks by index pays for
    each element."""
    return next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if nbytes % dtype.itemsize == 0)


class CacheArena:
    """``num_parents`` usable parents and the null parent, in one allocation that starts as zeros.

    The host's own memory is only touched when a block is first written, so there a large arena costs nothing until it
    is used.
    """

    def __init__(self, placement: Placement, layout: ArenaLayout, num_parents: int) -> None:
        if num_parents < 1:
            raise ValueError(
                f"an arena of {num_parents} parents cannot hold a single block; give the KV cache more memory"
            )
        self._placement = placement
        self.layout = layout
        self.num_parents = num_parents
        self.nbytes = (num_parents + 1) * layout.parent_bytes
        self._bytes = placement.huge_zeros(self.nbytes)
        self._elements = [
            self._bytes.view(dtype).view(-1, size // dtype.itemsize)
            for size, dtype in ((size, _widest(size)) for size in layout.block_bytes)
        ]

    @property
    def untouched_bytes(self) -> int | None:
        """Bytes that nothing was written to yet, so that they are reserved and not in memory; None: not known."""
        return untouched_bytes(self._bytes.data_ptr(), self.nbytes) if self._placement.is_host else 0

    def num_blocks(self, group: int) -> int:
        """Blocks of the group, the null parent's included."""
        return (self.num_parents + 1) * self.layout.facts[group].children_per_parent

    def field(self, group: int, layer: int, name: str) -> torch.Tensor:
        """Strided view [blocks, heads, rows, dim] of one field of one of the model's layers."""
        spec = self.layout.groups[group]
        dtype = dtype_of(spec, self.layout.dtype)
        rows, block = spec.rows_per_block, self.layout.block_bytes[group] // dtype.itemsize
        per_layer = spec.elements_per_block // len(spec.layers)
        offset = spec.layers.index(layer) * per_layer
        for cache_field in spec.fields:
            if cache_field.name == name:
                return self._bytes.view(dtype).as_strided(
                    (self.num_blocks(group), cache_field.heads, rows, cache_field.dim),
                    (block, rows * cache_field.dim, cache_field.dim, 1),
                    offset,
                )
            offset += cache_field.heads * rows * cache_field.dim
        raise KeyError(f"cache group {spec.group_id!r} has no field {name!r}")

    def fields(self, group: int, layer: int) -> dict[str, torch.Tensor]:
        """All fields of one of the model's layers, by name."""
        return {spec.name: self.field(group, layer, spec.name) for spec in self.layout.groups[group].fields}

    def blocks(self, group: int) -> torch.Tensor:
        """uint8 [blocks, bytes of a block] of the group, a view."""
        return self._bytes.view(-1, self.layout.block_bytes[group])

    def zero(self, group: int, blocks: NDArray[np.int32]) -> None:
        """Zeroes whole blocks of the group."""
        if blocks.size:
            self._elements[group].index_fill_(0, self._placement.upload(blocks.astype(np.int64)), 0)

    def copy(self, group: int, pairs: NDArray[np.int32]) -> None:
        """Copies whole blocks of the group, ``pairs`` [n, 2] (source, target), as if all at once."""
        if pairs.size:
            sources, targets = self._placement.upload(pairs.T.astype(np.int64, order="C"))
            view = self._elements[group]
            view.index_copy_(0, targets, view.index_select(0, sources))

    def poison(self) -> None:
        """Fills everything but the null parent with bytes that read as NaN, so that a read of the unwritten shows."""
        self._bytes[self.layout.parent_bytes :] = 0xFF
