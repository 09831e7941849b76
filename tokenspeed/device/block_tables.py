"""The persistent block tables of one cache group: which block holds which positions of each pool row.

Only the forward thread touches them. The scheduler sends deltas; a table's version says that none was lost, repeated or
applied out of order. Deltas apply to the host's tables; what they changed goes to the device with the step's inputs.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.forward_thread import DeviceStateLost
from tokenspeed.device.placement import Placement

if TYPE_CHECKING:
    from tokenspeed_scheduler import BlockTableDelta


_NO_IDS = np.zeros(0, np.int32)
_NONE = np.zeros(0, np.int64)


class BlockTableMismatch(DeviceStateLost):
    """A delta that does not fit the table it is for: scheduler and device no longer agree, so the engine must end."""


class BlockTables:
    """Tables for pool rows 0 .. max_num_seqs of one group.

    Attributes:
        group_id: the group's name, for errors.
        ids: int32 [rows, slots], on the host; entry (row, s) is the block with the row's tokens s * granularity and on;
            0 (the null block) where there is none.
        tensor: the device's; the same memory where that is the host's own.
    """

    def __init__(self, placement: Placement, *, group_id: str, num_rows: int, num_slots: int, num_blocks: int) -> None:
        self.group_id = group_id
        self.tensor = placement.zeros(num_rows, num_slots, dtype=torch.int32)
        self.ids: NDArray[np.int32] = (
            self.tensor.numpy() if placement.is_host else np.zeros((num_rows, num_slots), np.int32)
        )
        self._is_one = placement.is_host
        self._changed: list[NDArray[np.int64]] = []
        self._num_blocks = num_blocks
        self._length = [0] * num_rows
        self._version = [0] * num_rows

    def begin(self, row: int) -> None:
        """A request begins in ``row``: its table is empty and of version 0."""
        self._set(row, 0, _NO_IDS)
        self._version[row] = 0

    def changes(self) -> NDArray[np.int64]:
        """The entries that the device does not have yet, as indices into all of ``ids``; it has them from here on.
        None where both are one memory. An entry may come twice."""
        if not self._changed:
            return _NONE
        changed, self._changed = self._changed, []
        return changed[0] if len(changed) == 1 else np.concatenate(changed)

    def _set(self, row: int, first: int, ids: NDArray[np.int32]) -> None:
        """``ids`` in slot ``first`` of ``row`` and on, and none behind them."""
        end = first + ids.size
        self.ids[row, first:end] = ids
        self.ids[row, end : self._length[row]] = 0
        if not self._is_one:
            slots = np.arange(first, max(end, self._length[row]), dtype=np.int64)
            self._changed.append(slots + row * self.ids.shape[1])
        self._length[row] = end

    def apply(self, delta: "BlockTableDelta") -> None:
        """Applies every entry of ``delta`` in order; raises BlockTableMismatch at the first that does not fit."""
        rows = delta.row.tolist()
        if not rows:
            return
        ids, start = delta.ids, 0
        entries = zip(
            rows,
            delta.first_slot.tolist(),
            delta.count.tolist(),
            delta.version_from.tolist(),
            delta.version_to.tolist(),
            strict=True,
        )
        for row, first, count, version_from, version_to in entries:
            self._check(row, first, count, version_from, version_to)
            self._set(row, first, self._checked_ids(row, ids[start : start + count], count))
            self._version[row] = version_to
            start += count

    def _check(self, row: int, first: int, count: int, version_from: int, version_to: int) -> None:
        who = f"block table of group {self.group_id!r}, row {row}"
        if not 0 < row < len(self._version):
            raise BlockTableMismatch(f"{who}: there are rows 1 to {len(self._version) - 1}")
        if version_from != self._version[row]:
            raise BlockTableMismatch(
                f"{who}: a delta from version {version_from} to {version_to} came, the table has version "
                f"{self._version[row]}; a plan was lost, repeated or executed out of order"
            )
        if version_to != version_from + 1:
            raise BlockTableMismatch(
                f"{who}: a delta goes from version {version_from} to {version_to}, not one further"
            )
        if not 0 <= first <= self._length[row] or count < 0 or first + count > self.ids.shape[1]:
            raise BlockTableMismatch(
                f"{who}: a delta sets slots {first} to {first + count - 1}, the table has {self._length[row]} slots "
                f"and room for {self.ids.shape[1]}"
            )

    def _checked_ids(self, row: int, ids: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        if ids.size != count or (count and (ids.min() < 0 or ids.max() >= self._num_blocks)):
            raise BlockTableMismatch(
                f"block table of group {self.group_id!r}, row {row}: {count} ids announced, got {ids.tolist()}; "
                f"blocks are 0 to {self._num_blocks - 1}"
            )
        return ids
