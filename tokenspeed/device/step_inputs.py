"""The inputs of a step: written on the host, and on the device with one copy, where every size has its addresses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.attention.slots import write_slots
from tokenspeed.device.block_tables import BlockTables
from tokenspeed.device.forward_thread import DeviceStateLost
from tokenspeed.device.placement import Placement, Twin
from tokenspeed.device.sampling.rows import SamplingRows
from tokenspeed.device.step_memory import ALIGNMENT, Packing, Pair, aligned

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan


@dataclass(frozen=True, slots=True)
class Step:
    """One plan's batch, B rows and T tokens, prefills first. What of it is an array or a tensor is a view that the next
    step overwrites; tensors are on the device, and hold the step's numbers once it was uploaded.

    A forward may compute more tokens than there are, P of them: those from T on are padding, token 0 at position 0, in
    the null block. ``of_own`` has the T alone.

    Attributes:
        tokens: T.
        rows: pool row of each row, [B].
        num_extends: how many of the rows prefill.
        input_len, prefix_len: int32 [B].
        last_token: index among the T tokens of each row's last one, [B].
        sampling: indices of the rows that draw a token, S of them.
        drawing: what the sampler takes for these; see there.
        unknown: indices of the tokens that the host does not know: their rows' last ones, which never left the device.
        unknown_rows: pool rows of these.
        input_ids, positions: int32 [P] tensors.
        slots: int64 [P] tensor for each cache group; of a group of states it says nothing.
        rows_tensor: int64 [B]; input_len_tensor, prefix_len_tensor, seq_lens: int32 [B] tensors.
        input_len_host, prefix_len_host: the same int32 [B] tensors on the host.
    """

    tokens: int
    rows: NDArray[np.intp]
    num_extends: int
    input_len: NDArray[np.int32]
    prefix_len: NDArray[np.int32]
    last_token: NDArray[np.intp]
    sampling: NDArray[np.intp]
    drawing: SamplingRows
    unknown: NDArray[np.intp]
    unknown_rows: NDArray[np.intp]
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    rows_tensor: torch.Tensor
    input_len_tensor: torch.Tensor
    prefix_len_tensor: torch.Tensor
    seq_lens: torch.Tensor
    input_len_host: torch.Tensor
    prefix_len_host: torch.Tensor

    def of_own(self) -> "Step":
        """The same without padding, in the same memory."""
        count = self.tokens
        if self.input_ids.shape[0] == count:
            return self
        slots = tuple(slots[:count] for slots in self.slots)
        return replace(self, input_ids=self.input_ids[:count], positions=self.positions[:count], slots=slots)


@dataclass(frozen=True, slots=True)
class _TokenArrays:
    """The arrays of P tokens, which always have the same place; ``end``: the byte behind them."""

    input_ids: Pair[np.int32]
    positions: Pair[np.int32]
    slots: tuple[Pair[np.int64], ...]
    slot_tensors: tuple[torch.Tensor, ...]
    end: int

    @staticmethod
    def nbytes(tokens: int, groups: int) -> int:
        """What so many take at most."""
        return 2 * aligned(4 * tokens) + groups * aligned(8 * tokens)

    @staticmethod
    def within(packing: Packing, tokens: int, groups: int) -> "_TokenArrays":
        input_ids, positions = (packing.take(np.int32, tokens) for _ in range(2))
        slots = tuple(packing.take(np.int64, tokens) for _ in range(groups))
        return _TokenArrays(input_ids, positions, slots, tuple(pair.tensor for pair in slots), packing.end)

    def pad(self, tokens: int) -> None:
        """The tokens from number ``tokens`` on are nobody's."""
        self.input_ids.host[tokens:] = 0
        self.positions.host[tokens:] = 0
        for slots in self.slots:
            slots.host[tokens:] = 0


@dataclass(frozen=True, slots=True)
class _RowArrays:
    """The arrays of B rows behind those of the tokens; ``end``: the byte behind them."""

    rows: Pair[np.int64]
    input_len: Pair[np.int32]
    prefix_len: Pair[np.int32]
    seq_lens: Pair[np.int32]
    input_len_host: torch.Tensor
    prefix_len_host: torch.Tensor
    end: int

    @staticmethod
    def nbytes(rows: int) -> int:
        """What so many take at most."""
        return aligned(8 * rows) + 3 * aligned(4 * rows)

    @staticmethod
    def within(packing: Packing, rows: int) -> "_RowArrays":
        pool_rows = packing.take(np.int64, rows)
        input_len, prefix_len, seq_lens = (packing.take(np.int32, rows) for _ in range(3))
        return _RowArrays(
            pool_rows, input_len, prefix_len, seq_lens, input_len.on_host, prefix_len.on_host, packing.end
        )


_NONE = np.zeros(0, np.intp)

_CHANGES = 4096
"""Entries of tables and last tokens that go to the device with a step's own copy; what is more goes before it."""

Padded = Callable[[int, int], int]
"""How many tokens a forward computes for so many, of which so many rows prefill."""

_Change = tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int32]]


class StepInputs:
    """Turns a plan into a step. Keeps each pool row's last token, which ids of -1 stand for, on the device."""

    def __init__(
        self,
        placement: Placement,
        tables: list[BlockTables],
        granularities: list[int],
        *,
        max_rows: int,
        max_tokens: int,
        vocab_size: int,
    ) -> None:
        self._placement = placement
        self._tables = tables
        self._granularities = granularities
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        pool_rows = tables[0].ids.shape[0]
        self._last_token = placement.zeros(pool_rows, dtype=torch.int32)
        # The same on the host where both are one memory: the arithmetic there is quicker without torch.
        self._last_known: NDArray[np.int32] | None = self._last_token.numpy() if placement.is_host else None
        # Those known on the host that the device has yet to hear of; on one memory it is told at once.
        self._told: dict[int, int] = {}
        nbytes = _TokenArrays.nbytes(max_tokens, len(tables)) + _RowArrays.nbytes(max_rows)
        nbytes += SamplingRows.nbytes(max_rows)
        if not placement.is_host:  # unknown ids, and changes in every table and of last tokens
            nbytes += 2 * aligned(8 * max_tokens) + 12 * _CHANGES + (1 + len(tables)) * 2 * ALIGNMENT
        self._twin = Twin(placement, nbytes)
        self._token_arrays: dict[int, _TokenArrays] = {}
        self._row_arrays: dict[tuple[int, int], _RowArrays] = {}
        self._drawing: dict[tuple[int, int], SamplingRows] = {}

    def remember(self, rows: torch.Tensor, tokens: torch.Tensor, nan: torch.Tensor) -> None:
        """Pool rows ``rows`` int64 [S] drew ``tokens`` int32 [S]; where ``nan`` bool [S] they drew nothing, which is
        kept as 0, because a step may be queued behind it. All on the device."""
        self._last_token.index_copy_(0, rows, tokens.masked_fill(nan, 0))

    def tell(self, row: int, token: int) -> None:
        """A request begins again in pool row ``row``, whose last token was ``token``."""
        if self._last_known is not None:
            self._last_known[row] = token
        else:
            self._told[row] = token

    def build(self, plan: "Plan", sampling: NDArray[np.intp], padded: Padded) -> Step:
        """The step of ``plan``, on the host; ``upload`` brings it to the device. ``sampling``: the rows that draw a
        token. Raises ValueError for a plan that does not fit this device."""
        rows = plan.row.astype(np.intp)
        count, tokens = rows.shape[0], plan.input_ids.shape[0]
        self._check(count, tokens, plan)
        num_extends = count - int(np.count_nonzero(plan.kind))
        size = padded(tokens, num_extends)
        self._twin.begin()
        # Decodes, and what is padded to a size, come again; the lengths of prefills would fill memory with views.
        kept = num_extends == 0 or size != tokens
        arrays, by_row = self._arrays_of(size, count, kept)
        input_len, prefix_len = by_row.input_len.host, by_row.prefix_len.host
        input_len[:], prefix_len[:] = plan.input_len, plan.prefix_len
        positions = arrays.positions.host
        if size != tokens:
            arrays.pad(tokens)
            positions = positions[:tokens]
        if tokens == count:
            token_rows, ends = rows, np.arange(1, count + 1)
            positions[:] = prefix_len
        else:
            token_rows, ends = np.repeat(rows, input_len), np.cumsum(input_len)
            positions[:] = np.arange(tokens) + np.repeat(prefix_len - (ends - input_len), input_len)
        arrays.input_ids.host[:tokens] = plan.input_ids
        unknown = self._unknown(plan, token_rows, arrays.input_ids.host[:tokens])
        for tables, granularity, slots in zip(self._tables, self._granularities, arrays.slots, strict=True):
            if granularity:
                write_slots(tables.ids, token_rows, positions, granularity, slots.host[:tokens])
        np.add(prefix_len, input_len, out=by_row.seq_lens.host)
        by_row.rows.host[:] = rows
        return Step(
            tokens=tokens,
            rows=rows,
            num_extends=num_extends,
            input_len=input_len,
            prefix_len=prefix_len,
            last_token=ends - 1,
            sampling=sampling,
            drawing=self._drawing_of(by_row.end, sampling.shape[0], kept),
            unknown=unknown,
            unknown_rows=token_rows[unknown],
            input_ids=arrays.input_ids.tensor,
            positions=arrays.positions.tensor,
            slots=arrays.slot_tensors,
            rows_tensor=by_row.rows.tensor,
            input_len_tensor=by_row.input_len.tensor,
            prefix_len_tensor=by_row.prefix_len.tensor,
            seq_lens=by_row.seq_lens.tensor,
            input_len_host=by_row.input_len_host,
            prefix_len_host=by_row.prefix_len_host,
        )

    def _unknown(self, plan: "Plan", token_rows: NDArray[np.intp], ids: NDArray[np.int32]) -> NDArray[np.intp]:
        """The ids of -1 that the device has to fill in; where it is the host, they are filled in now."""
        if self._last_known is None:
            return np.flatnonzero(plan.input_ids < 0)
        np.copyto(ids, self._last_known[token_rows], where=plan.input_ids < 0)
        return _NONE

    def upload(self, step: Step) -> None:
        """Brings the step, and whatever of tables and last tokens changed since the last one, to the device; does not
        wait. Raises DeviceStateLost where that fails: the device's tables are not the scheduler's then."""
        if self._placement.is_host:
            return
        try:
            self._upload(step)
        except RuntimeError as error:
            raise DeviceStateLost(f"the inputs of a step did not get to the device: {error}") from error

    def _upload(self, step: Step) -> None:
        packing = Packing(self._twin, step.drawing.end)
        unknown = packing.copied(np.int64, step.unknown), packing.copied(np.int64, step.unknown_rows)
        changes = self._changes(packing)
        self._twin.upload(packing.end)
        for target, places, values in changes:
            target.index_copy_(0, places, values)
        if step.unknown.size:
            places, rows = unknown
            step.input_ids.index_copy_(0, places, self._last_token.index_select(0, rows))

    def _changes(self, packing: Packing) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """What the device does not have yet: a tensor of one dimension, int64 places in it, and int32 values. Those for
        which a step's memory has no room are there when this returns."""
        found: list[_Change] = []
        for tables in self._tables:
            places = tables.changes()
            found.append((tables.tensor.view(-1), places, tables.ids.reshape(-1)[places]))
        told, self._told = self._told, {}
        found.append((self._last_token, np.array(list(told), np.int64), np.array(list(told.values()), np.int32)))
        room, packed = _CHANGES, []
        for target, places, values in found:
            if places.size > room:
                beyond = self._placement.upload(places[room:]), self._placement.upload(values[room:])
                target.index_copy_(0, *beyond)
                places, values = places[:room], values[:room]
            if places.size:
                packed.append((target, packing.copied(np.int64, places), packing.copied(np.int32, values)))
            room -= places.size
        return packed

    def _arrays_of(self, tokens: int, rows: int, kept: bool) -> tuple[_TokenArrays, _RowArrays]:
        """Those of a size that is kept are the same objects each time: whoever captured a forward knows its inputs by
        that."""
        by_token = self._token_arrays.get(tokens)
        if by_token is None:
            by_token = _TokenArrays.within(Packing(self._twin), tokens, len(self._tables))
            if kept:
                self._token_arrays[tokens] = by_token
        by_row = self._row_arrays.get((tokens, rows))
        if by_row is None:
            by_row = _RowArrays.within(Packing(self._twin, by_token.end), rows)
            if kept:
                self._row_arrays[tokens, rows] = by_row
        return by_token, by_row

    def _drawing_of(self, start: int, rows: int, kept: bool) -> SamplingRows:
        found = self._drawing.get((start, rows))
        if found is None:
            found = SamplingRows.within(Packing(self._twin, start), rows)
            if kept:
                self._drawing[start, rows] = found
        return found

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
