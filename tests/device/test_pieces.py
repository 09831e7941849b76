"""A prefill in pieces: where they end, what breaks see of padding, and when the forward runs plainly."""

import logging
from collections.abc import Callable
from typing import cast

import pytest
import torch

from tokenspeed.device.graphs.check import ReplayCheck
from tokenspeed.device.graphs.dispatch import DispatchGraphs
from tokenspeed.device.graphs.native import NativeGraphs
from tokenspeed.device.graphs.pieces import Break, CapturedPrefill
from tokenspeed.device.graphs.provider import ReplayError
from tokenspeed.layers.batch import Attention, ForwardBatch
from tokenspeed_kernel.serving_guard import GUARD_VARIABLE, ServingViolation, begin_serving, process_guard

MOST = 8


class Ragged:
    """Stands for attention: sums each row's tokens up to each of them; the rows are set from outside."""

    def __init__(self) -> None:
        self.lengths = [1]
        self.seen: list[int] = []

    def sum_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.seen.append(x.shape[0])
        assert sum(self.lengths) == x.shape[0], "padding is nobody's"
        for part, written in zip(x.split(self.lengths), out.split(self.lengths), strict=True):
            torch.cumsum(part, 0, out=written)


class Model:
    """Two layers of work on each token, with a call on rows in the middle of each."""

    def __init__(self, ragged: Ragged, *, apart: bool = True, leaves: bool = True) -> None:
        self._hidden, self._summed = torch.zeros(MOST, 3), torch.zeros(MOST, 3)
        self._table = torch.randn(10, 3)
        self._ragged, self._apart, self._leaves = ragged, apart, leaves
        self.runs = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        tokens = batch.input_ids.shape[0]
        hidden, summed = self._hidden[:tokens], self._summed[:tokens]
        self.runs += 1
        torch.index_select(self._table, 0, batch.input_ids, out=hidden)
        for _ in range(2):
            hidden.mul_(1.5).add_(batch.positions.unsqueeze(1))
            if self._leaves and self._apart:
                batch.apart(self._mix, hidden, summed)
            elif self._leaves:
                self._mix(batch, hidden, summed)
            torch.tanh(summed, out=hidden)
        return hidden

    def _mix(self, batch: ForwardBatch, hidden: torch.Tensor, summed: torch.Tensor) -> None:
        cast(Ragged, batch.attention[0]).sum_rows(hidden, summed)


class Inputs:
    """Memory that stays, as StepInputs has it."""

    def __init__(self, ragged: Ragged) -> None:
        self._ids, self._positions = torch.zeros(MOST, dtype=torch.int32), torch.zeros(MOST, dtype=torch.int32)
        self._ragged = ragged

    def batch(self, lengths: list[int], padded: int) -> tuple[ForwardBatch, ForwardBatch]:
        tokens = sum(lengths)
        self._ragged.lengths = lengths
        self._ids.zero_()
        self._positions.zero_()
        self._ids[:tokens] = torch.arange(1, tokens + 1, dtype=torch.int32)
        self._positions[:tokens] = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
        attention = (cast(Attention, self._ragged),)
        real, whole = (
            ForwardBatch(self._ids[:count], self._positions[:count], (), attention) for count in (tokens, padded)
        )
        return real, whole


Make = Callable[..., tuple[CapturedPrefill, Model, Ragged, Inputs]]


@pytest.fixture
def make() -> Make:
    def made(
        *, sizes: tuple[int, ...] = (4, 8), check: bool = True, **model: bool
    ) -> tuple[CapturedPrefill, Model, Ragged, Inputs]:
        ragged = Ragged()
        toy, inputs = Model(ragged, **model), Inputs(ragged)
        watching = ReplayCheck((), exact=True) if check else None
        prefill = CapturedPrefill(toy.forward, DispatchGraphs(), sizes=sizes, check=watching)
        prefill.capturing(takes=True)
        for tokens in prefill.to_capture:
            prefill(*inputs.batch([tokens], tokens))
        prefill.capturing(takes=False)
        return prefill, toy, ragged, inputs

    return made


@pytest.mark.parametrize("lengths", [[1], [2, 1], [4], [3, 2], [1, 1, 5]])
def test_pieces_give_what_the_plain_forward_gives(make: Make, lengths: list[int]) -> None:
    prefill, toy, ragged, inputs = make()
    assert prefill.sizes == [4, 8]
    tokens = sum(lengths)
    padded = prefill.tokens_for(tokens)
    assert padded == (4 if tokens <= 4 else 8)
    batch, whole = inputs.batch(lengths, padded)
    expected = toy.forward(batch).clone()
    ragged.seen.clear()
    assert torch.equal(prefill(batch, whole)[:tokens], expected)
    assert ragged.seen == [tokens] * 4, "two breaks of the replay and two of its twin, over the step's own tokens"


def test_a_replay_runs_no_forward(make: Make) -> None:
    prefill, toy, _, inputs = make(check=False)
    before = toy.runs
    prefill(*inputs.batch([3], 4))
    assert toy.runs == before


def test_what_no_size_has_room_for_runs_plainly(make: Make) -> None:
    prefill, toy, _, inputs = make(sizes=(4,))
    assert [prefill.tokens_for(tokens) for tokens in (1, 4, 5)] == [4, 4, 5]
    batch, whole = inputs.batch([5], 5)
    before = toy.runs
    prefill(batch, whole)
    assert toy.runs == before + 1


def test_other_memory_runs_plainly(make: Make) -> None:
    prefill, toy, ragged, inputs = make(sizes=(4,))
    inputs.batch([3], 4)
    elsewhere = Inputs(ragged)
    batch, whole = elsewhere.batch([3], 4)
    before = toy.runs
    assert prefill(batch, whole).shape[0] == 3
    assert toy.runs == before + 1


def test_breaks_see_the_steps_own_tokens_and_leave_zeros_behind_them() -> None:
    x, parts = torch.ones(4, 2), (torch.ones(4, 1), torch.ones(4, 3))
    seen: list[tuple[int, ...]] = []

    def body(_: ForwardBatch, given: torch.Tensor, written: tuple[torch.Tensor, torch.Tensor]) -> None:
        seen.append((given.shape[0], *(part.shape[0] for part in written)))
        for part in written:
            part.fill_(7.0)

    ids = torch.zeros(3, dtype=torch.int32)
    Break(body, (x, parts)).run(ForwardBatch(ids, ids, (), ()))
    assert seen == [(3, 3, 3)]
    assert [part[:, 0].tolist() for part in parts] == [[7.0, 7.0, 7.0, 0.0]] * 2
    assert x.tolist() == [[1.0, 1.0]] * 4


def test_attention_in_the_middle_of_a_piece_is_refused(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    prefill, *_ = make(apart=False)
    assert prefill.sizes == []
    assert caplog.messages == [
        "prefill steps are not captured: a layer asks the attention of group 0 in the middle of a piece; let it do so "
        "by ForwardBatch.apart"
    ]


def test_a_model_without_breaks_is_not_captured(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    prefill, *_ = make(leaves=False)
    assert prefill.sizes == []
    assert "name no part that runs apart" in caplog.text


def test_whole_forwards_alone_and_no_sizes(caplog: pytest.LogCaptureFixture) -> None:
    ragged = Ragged()
    toy, native = Model(ragged), NativeGraphs(lambda body: (body(), lambda: None))
    with caplog.at_level(logging.INFO):
        for provider, sizes in ((native, (4,)), ("scheduler.graphs is off", (4,)), (native, ())):
            prefill = CapturedPrefill(toy.forward, provider, sizes=sizes)
            assert (prefill.to_capture, prefill.tokens_for(3)) == ([], 3)
    assert caplog.messages == [
        "prefill steps are not captured: the recorder captures whole forwards alone",
        "prefill steps are not captured: scheduler.graphs is off",
    ]


def test_nothing_is_captured_while_serving(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, _, _, inputs = make(sizes=(4,))
    fresh = CapturedPrefill(Model(Ragged()).forward, DispatchGraphs(), sizes=(4,))
    fresh.capturing(takes=True)
    monkeypatch.setenv(GUARD_VARIABLE, "strict")
    begin_serving()
    try:
        prefill(*inputs.batch([2], 4))
        with pytest.raises(ServingViolation, match="capture of prefill of 4 tokens while serving"):
            fresh(*inputs.batch([4], 4))
    finally:
        process_guard().end()


def test_a_twin_that_differs_is_told(make: Make) -> None:
    prefill, toy, _, inputs = make(sizes=(4,))
    toy._table = torch.randn(10, 3)  # a weight made anew: the pieces read the old one
    with pytest.raises(ReplayError, match="differs from its eager twin in 3 rows"):
        prefill(*inputs.batch([3], 4))
