"""Runs every kind of step once before serving, so that nothing is compiled or first read later."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True)
class _NoDelta:
    row: NDArray[np.int32] = field(default_factory=lambda: _EMPTY)
    first_slot: NDArray[np.int32] = field(default_factory=lambda: _EMPTY)
    count: NDArray[np.int32] = field(default_factory=lambda: _EMPTY)
    version_from: NDArray[np.int32] = field(default_factory=lambda: _EMPTY)
    version_to: NDArray[np.int32] = field(default_factory=lambda: _EMPTY)
    ids: NDArray[np.int32] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, kw_only=True)
class WarmUpPlan:
    """A plan of made-up rows whose tables are empty: all they write lands in the null block, which nobody reads."""

    row: NDArray[np.int32]
    kind: NDArray[np.int32]
    input_len: NDArray[np.int32]
    num_groups: int

    forward_id = 0
    starts = _EMPTY

    @property
    def num_rows(self) -> int:
        return int(self.row.shape[0])

    @property
    def handle(self) -> NDArray[np.int32]:
        return self.row

    @property
    def prefix_len(self) -> NDArray[np.int32]:
        return np.zeros_like(self.row)

    @property
    def prompt_len(self) -> NDArray[np.int32]:
        return self.input_len

    @property
    def samples(self) -> NDArray[np.int32]:
        return np.ones_like(self.row)

    @property
    def input_ids(self) -> NDArray[np.int32]:
        return np.zeros(int(self.input_len.sum()), np.int32)

    @property
    def tables(self) -> list[_NoDelta]:
        return [_NoDelta()] * self.num_groups

    @property
    def zero_blocks(self) -> list[NDArray[np.int32]]:
        return [_EMPTY] * self.num_groups

    @property
    def copy_blocks(self) -> list[NDArray[np.int32]]:
        return [_EMPTY.reshape(0, 2)] * self.num_groups

    @property
    def operations(self) -> list[object]:
        return []

    @property
    def aborts(self) -> list[object]:
        return []


def warm_up_plans(*, chunk: int, max_seqs: int, num_groups: int) -> Iterator[tuple[str, WarmUpPlan]]:
    """Each kind of step with its name: a prefill chunk, a decode of one row and of all, and a mixed batch."""

    def plan(extends: int, length: int, decodes: int) -> WarmUpPlan:
        rows = np.arange(1, extends + decodes + 1, dtype=np.int32)
        kinds = np.array([0] * extends + [1] * decodes, np.int32)
        lengths = np.array([length] * extends + [1] * decodes, np.int32)
        return WarmUpPlan(row=rows, kind=kinds, input_len=lengths, num_groups=num_groups)

    yield f"prefill of {chunk} tokens", plan(1, chunk, 0)
    yield "decode of 1 row", plan(0, 0, 1)
    if max_seqs > 1:
        yield f"decode of {max_seqs} rows", plan(0, 0, max_seqs)
        yield "prefill and decode together", plan(1, min(chunk, 8), 1)


class _Outcome(Protocol):
    @property
    def nan(self) -> NDArray[np.bool_]: ...


def warm_up(
    execute: Callable[[WarmUpPlan], _Outcome],
    *,
    chunk: int,
    max_seqs: int,
    num_groups: int,
    report: Callable[[int, int, str], None],
) -> bool:
    """Executes every plan; ``report(done, total, name)`` before each and after the last.

    Returns whether all logits were numbers.
    """
    plans = list(warm_up_plans(chunk=chunk, max_seqs=max_seqs, num_groups=num_groups))
    is_sound = True
    for done, (name, plan) in enumerate(plans):
        report(done, len(plans), name)
        is_sound &= not bool(execute(plan).nan.any())
    report(len(plans), len(plans), "every kind of step ran")
    return is_sound
