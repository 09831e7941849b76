"""Recorded decode forwards: recorded once a size, made again over the same memory, plain where they cannot be."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed.device.recorded import RecordedForwards
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed_kernel.recording import RecordingError


class Nothing:
    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("no model runs here")


ATTENTION = Nothing()


def batch(rows: int) -> ForwardBatch:
    ids = torch.zeros(rows, dtype=torch.int32)
    return ForwardBatch(input_ids=ids, positions=ids, slots=(ids.long(),), attention=ATTENTION)


class Tape:
    """Counts what is recorded and replayed."""

    def __init__(self, refuse: str = "") -> None:
        self.recorded = 0
        self.replayed = 0
        self._refuse = refuse

    def __call__(self, body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        if self._refuse:
            raise RecordingError(self._refuse)
        return body(), self._replay

    def _replay(self) -> None:
        self.replayed += 1


class Plain:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, given: ForwardBatch) -> torch.Tensor:
        rows = given.input_ids.shape[0]
        self.calls.append(rows)
        return torch.full((rows,), float(rows))


def test_each_size_is_recorded_once_and_replayed() -> None:
    tape, plain = Tape(), Plain()
    forwards = RecordedForwards(plain, tape, max_rows=4)
    one, three = batch(1), batch(3)
    for given in (one, three, one, one, three):
        assert forwards(given).tolist() == [float(given.input_ids.shape[0])] * given.input_ids.shape[0]
    assert (forwards.sizes, tape.recorded, tape.replayed, plain.calls) == ([1, 3], 2, 3, [1, 3])


def test_other_memory_and_larger_steps_run_plainly() -> None:
    tape, plain = Tape(), Plain()
    forwards = RecordedForwards(plain, tape, max_rows=2)
    forwards(batch(2))
    forwards(batch(2))
    forwards(batch(3))
    assert (tape.recorded, tape.replayed, plain.calls) == (1, 0, [2, 2, 3])


def test_none_are_recorded_where_none_may_be() -> None:
    tape, plain = Tape(), Plain()
    forwards = RecordedForwards(plain, tape, max_rows=0)
    forwards(batch(1))
    assert (tape.recorded, plain.calls) == (0, [1])


def test_what_cannot_be_recorded_runs_plainly_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tape, plain = Tape(refuse="add_ ran beside the kernels"), Plain()
    forwards = RecordedForwards(plain, tape, max_rows=4)
    given = batch(2)
    with caplog.at_level(logging.INFO):
        forwards(given)
        forwards(given)
        RecordedForwards(plain, "the reference cannot be recorded", max_rows=4)(given)
    assert (tape.recorded, plain.calls) == (1, [2, 2, 2])
    assert caplog.messages == [
        "decode steps are not recorded: add_ ran beside the kernels",
        "decode steps are not recorded: the reference cannot be recorded",
    ]
