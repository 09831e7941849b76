"""Captured decode forwards: once a size, padded to the ladder, over the same memory, plain where none fits."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.device.graphs.check import ReplayCheck
from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.device.graphs.native import NativeGraphs
from tokenspeed.device.graphs.provider import Graph, GraphCaptureError, GraphProvider, ReplayError
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed_kernel.recording import RecordingError
from tokenspeed_kernel.serving_guard import GUARD_VARIABLE, ServingViolation, begin_serving, process_guard

ATTENTION = ()


def batch(rows: int) -> ForwardBatch:
    ids = torch.zeros(rows, dtype=torch.int32)
    return ForwardBatch(input_ids=ids, positions=ids, slots=(ids.long(),), attention=ATTENTION)


def before(rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.int32)


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


class Ladder:
    """A provider that captures at the start, and notes in what order what is done."""

    name, as_it_runs = "ladder", False

    def __init__(self) -> None:
        self.events: list[str] = []
        self.replays: list[tuple[list[int], int]] = []

    def warm_up(self, body: Callable[[], object]) -> None:
        self.events.append(f"warm {body().shape[0]}")  # type: ignore[attr-defined]

    def capture(self, body: Callable[[], Any]) -> tuple[Any, Graph]:
        result = body()
        self.events.append(f"capture {result.shape[0]}")
        return result, self

    def replay(self, before: np.ndarray, rows: int) -> None:
        self.replays.append((before.tolist(), rows))

    def synchronize(self) -> None:
        """Everything is done at once."""


def test_each_size_is_recorded_once_and_replayed() -> None:
    tape, plain = Tape(), Plain()
    decode = CapturedDecode(plain, NativeGraphs(tape), sizes=range(1, 5))
    one, three = batch(1), batch(3)
    for given in (one, three, one, one, three):
        rows = given.input_ids.shape[0]
        assert decode.rows_for(rows) == rows
        assert decode(given, before(rows)).tolist() == [float(rows)] * rows
    assert (decode.sizes, tape.recorded, tape.replayed, plain.calls) == ([1, 3], 2, 3, [1, 3])
    assert decode.to_capture == []


def test_other_memory_and_larger_steps_run_plainly() -> None:
    tape, plain = Tape(), Plain()
    decode = CapturedDecode(plain, NativeGraphs(tape), sizes=(1, 2))
    for rows in (2, 2, 3):
        decode(batch(rows), before(rows))
    assert (tape.recorded, tape.replayed, plain.calls) == (1, 0, [2, 2, 3])


def test_none_are_recorded_where_none_may_be() -> None:
    tape, plain = Tape(), Plain()
    CapturedDecode(plain, NativeGraphs(tape), sizes=())(batch(1), before(1))
    assert (tape.recorded, plain.calls) == (0, [1])


def test_what_cannot_be_recorded_runs_plainly_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tape, plain = Tape(refuse="add_ ran beside the kernels"), Plain()
    decode = CapturedDecode(plain, NativeGraphs(tape), sizes=(1, 2))
    given = batch(2)
    with caplog.at_level(logging.INFO):
        decode(given, before(2))
        decode(given, before(2))
        CapturedDecode(plain, "the reference cannot be recorded", sizes=(1, 2))(given, before(2))
    assert (tape.recorded, plain.calls) == (1, [2, 2, 2])
    assert caplog.messages == [
        "decode steps are not captured: add_ ran beside the kernels",
        "decode steps are not captured: the reference cannot be recorded",
    ]


def test_an_error_of_a_step_that_is_recorded_comes_through() -> None:
    """It ran: once more, and states would go a token too far."""
    tape, plain = Tape(), Plain()

    def breaks(given: ForwardBatch) -> torch.Tensor:
        plain(given)
        raise RuntimeError("a peer is gone")

    decode = CapturedDecode(breaks, NativeGraphs(tape), sizes=(1, 2))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        decode(batch(2), before(2))
    assert plain.calls == [2]


def test_a_ladder_is_captured_when_it_is_taken_and_pads_afterwards() -> None:
    provider, plain = Ladder(), Plain()
    decode = CapturedDecode(plain, provider, sizes=(1, 4, 8))
    batches = {rows: batch(rows) for rows in (1, 2, 4, 8, 9)}
    decode(batches[4], before(4))
    assert (provider.events, decode.sizes, decode.rows_for(3)) == ([], [], 3), "nothing is taken yet"
    decode.capturing(takes=True)
    for rows in decode.to_capture:
        assert decode.rows_for(rows) == rows, "while it is captured, a size is not padded to a larger one"
        decode(batches[rows], before(rows))
    decode.capturing(takes=False)
    assert provider.events == [f"{what} {rows}" for rows in (8, 4, 1) for what in ("warm", "capture")]
    assert [rows for _, rows in provider.replays] == [8, 4, 1], "a device computes nothing while it captures"
    assert [decode.rows_for(rows) for rows in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, 9]
    plain.calls.clear()
    decode(batches[4], before(3))
    decode(batches[9], before(9))
    decode(batches[2], before(2))
    assert (provider.replays[3:], plain.calls) == ([([0, 1, 2], 4)], [9, 2])


def test_nothing_is_captured_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GUARD_VARIABLE, "strict")
    provider = Ladder()
    decode = CapturedDecode(Plain(), provider, sizes=(2,))
    decode.capturing(takes=True)
    begin_serving()
    try:
        with pytest.raises(ServingViolation, match="capture of decode of 2 rows while serving"):
            decode(batch(2), before(2))
    finally:
        process_guard().end()
    assert provider.events == []


def test_a_size_that_cannot_be_captured_ends_the_capturing(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Ladder):
        def capture(self, body: Callable[[], Any]) -> tuple[Any, Graph]:
            raise GraphCaptureError("the host reads seq_lens")

    plain = Plain()
    decode = CapturedDecode(plain, Refusing(), sizes=(1, 2))
    decode.capturing(takes=True)
    assert decode(batch(2), before(2)).shape == (2,)
    assert decode(batch(1), before(1)).shape == (1,)
    assert caplog.messages == ["decode steps are not captured: the host reads seq_lens"]
    assert (decode.sizes, decode.to_capture, decode.rows_for(1)) == ([], [], 1)


class Hidden:
    """A forward into one buffer, and a replay that goes wrong on demand."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(2, 3)
        self.values = torch.ones(2, 3)

    def eager(self) -> torch.Tensor:
        return self.buffer.copy_(self.values)


def check(replay: Callable[[Hidden], object], *, exact: bool = True, moved: bool = False) -> torch.Tensor:
    hidden = Hidden()

    def eager() -> torch.Tensor:
        return hidden.eager().clone() if moved else hidden.eager()

    ReplayCheck((), exact=exact).replay(lambda: replay(hidden), hidden.buffer, eager)  # type: ignore[arg-type, func-returns-value]
    return hidden.buffer


def test_a_replay_is_compared_with_its_twin() -> None:
    assert torch.equal(check(lambda hidden: hidden.eager()), torch.ones(2, 3))
    with pytest.raises(ReplayError, match="left 1 of 2 rows unwritten, the first of them row 1"):
        check(lambda hidden: hidden.buffer[:1].fill_(1.0))
    with pytest.raises(ReplayError, match=r"differs from its eager twin in 1 rows, first at row 0, column 2: 1.5"):
        check(lambda hidden: hidden.eager()[0, 2].fill_(1.5))
    with pytest.raises(ReplayError, match="a buffer was made anew"):
        check(lambda hidden: hidden.eager(), moved=True)


def test_devices_have_a_tolerance() -> None:
    near = check(lambda hidden: hidden.eager().add_(1e-3), exact=False)
    assert torch.equal(near, torch.ones(2, 3) + 1e-3), "what the replay gave is what is served"
    with pytest.raises(ReplayError, match="differs"):
        check(lambda hidden: hidden.eager().add_(1e-3))
    with pytest.raises(ReplayError, match="differs"):
        check(lambda hidden: hidden.eager().add_(0.1), exact=False)


def test_providers_keep_the_protocol() -> None:
    provider: GraphProvider = NativeGraphs(Tape())
    assert provider.as_it_runs
    provider.synchronize()
