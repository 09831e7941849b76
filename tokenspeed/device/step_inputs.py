"""The inputs of a step in memory that stays: numpy for the host's arithmetic, torch views of the same bytes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.attention.slots import write_slots
from tokenspeed.device.block_tables import BlockTables

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan


@dataclass(frozen=True, slots=True)
class Step:
    """One plan's batch, B rows and T tokens, prefills first. Arrays are views that the next step overwrites.

    Attributes:
        rows: pool row of each row, [B].
        num_extends: how many of the rows prefill.
        input_len, prefix_len: int32 [B].
        last_token: index among the T tokens of each row's last one, [B].
        sampling: indices of the rows that sample.
        input_ids, positions: int32 [T] tensors.
        slots: int64 [T] tensor for each cache group; of a group of states it says nothing.
        rows_tensor: int64 [B]; input_len_tensor, prefix_len_tensor, seq_lens: int32 [B] tensors.
    """

    rows: NDArray[np.intp]
    num_extends: int
    input_len: NDArray[np.int32]
    prefix_len: NDArray[np.int32]
    last_token: NDArray[np.intp]
    sampling: NDArray[np.intp]
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    rows_tensor: torch.Tensor
    input_len_tensor: torch.Tensor
    prefix_len_tensor: torch.Tensor
    seq_lens: torch.Tensor


_KEPT_VIEWS = 512
"""Decode sizes recur and are kept; the lengths of prefill batches would fill memory with views used once."""

_Number = TypeVar("_Number", np.int32, np.int64)


class _Array(Generic[_Number]):
    """Memory seen by numpy and by torch, with torch views kept for the sizes seen."""

    def __init__(self, size: int, dtype: type[_Number]) -> None:
        self.host: NDArray[_Number] = np.zeros(size, dtype)
        self._tensor = torch.from_numpy(self.host)
        self._views: dict[int, torch.Tensor] = {}

    def view(self, size: int) -> torch.Tensor:
        found = self._views.get(size)
        if found is None:
            found = self._tensor[:size]
            if len(self._views) < _KEPT_VIEWS:
                self._views[size] = found
        return found


class StepInputs:
    """Turns a plan into a step. Keeps each pool row's last token, which ids of -1 stand for."""

    def __init__(self, tables: list[BlockTables], granularities: list[int], *, max_rows: int, max_tokens: int,
                 vocab_size: int) -> None:  # fmt: skip
        self._tables = tables
        self._granularities = granularities
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._last_token = np.zeros(tables[0].ids.shape[0], np.int32)
        self._input_ids = _Array(max_tokens, np.int32)
        self._positions = _Array(max_tokens, np.int32)
        self._slots = [_Array(max_tokens, np.int64) for _ in tables]
        self._rows = _Array(max_rows, np.int64)
        self._input_len, self._prefix_len, self._seq_lens = (_Array(max_rows, np.int32) for _ in range(3))

    def remember(self, rows: NDArray[np.intp], tokens: NDArray[np.int32]) -> None:
        """Pool rows ``rows`` drew ``tokens``; -1 (no token) is kept as 0, because a step may be queued behind it."""
        self._last_token[rows] = np.maximum(tokens, 0)

    def build(self, plan: "Plan") -> Step:
        """The step of ``plan``. Raises ValueError for a plan that does not fit this device."""
        rows = plan.row.astype(np.intp)
        count, input_ids = rows.shape[0], plan.input_ids
        tokens = input_ids.shape[0]
        self._check(count, tokens, plan)
        num_extends = count - int(np.count_nonzero(plan.kind))
        input_len, prefix_len = self._input_len.host[:count], self._prefix_len.host[:count]
        input_len[:], prefix_len[:] = plan.input_len, plan.prefix_len
        positions, ids = self._positions.host[:tokens], self._input_ids.host[:tokens]
        if tokens == count:
            token_rows, ends = rows, np.arange(1, count + 1)
            positions[:] = prefix_len
        else:
            token_rows, ends = np.repeat(rows, input_len), np.cumsum(input_len)
            positions[:] = np.arange(tokens) + np.repeat(prefix_len - (ends - input_len), input_len)
        np.copyto(ids, input_ids)
        np.copyto(ids, self._last_token[token_rows], where=input_ids < 0)
        for tables, granularity, slots in zip(self._tables, self._granularities, self._slots, strict=True):
            if granularity:
                write_slots(tables.ids, token_rows, positions, granularity, slots.host[:tokens])
        np.add(prefix_len, input_len, out=self._seq_lens.host[:count])
        self._rows.host[:count] = rows
        return Step(
            rows=rows,
            num_extends=num_extends,
            input_len=input_len,
            prefix_len=prefix_len,
            last_token=ends - 1,
            sampling=np.flatnonzero(plan.samples),
            input_ids=self._input_ids.view(tokens),
            positions=self._positions.view(tokens),
            slots=tuple(slots.view(tokens) for slots in self._slots),
            rows_tensor=self._rows.view(count),
            input_len_tensor=self._input_len.view(count),
            prefix_len_tensor=self._prefix_len.view(count),
            seq_lens=self._seq_lens.view(count),
        )

    def _check(self, count: int, tokens: int, plan: "Plan") -> None:
        if count > self._max_rows or tokens > self._max_tokens:
            raise ValueError(
                f"plan {plan.forward_id} has {count} rows and {tokens} tokens, the device is built for "
                f"{self._max_rows} rows and {self._max_tokens} tokens; raise scheduler.max_seqs or scheduler.chunk"
            )
        if int(plan.input_len.sum()) != tokens or int(plan.input_len.min()) < 1:
            raise ValueError(
                f"plan {plan.forward_id} has {tokens} input ids for rows of {plan.input_len.tolist()} tokens"
            )
        if int(plan.input_ids.max()) >= self._vocab_size:
            raise ValueError(
                f"plan {plan.forward_id} has the token {int(plan.input_ids.max())}, the vocabulary ends at "
                f"{self._vocab_size - 1}; the frontend is to refuse such a prompt"
            )
