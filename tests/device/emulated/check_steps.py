"""One step on the emulated device: what it copies, which addresses it reads, and that every slip shows."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from emulated_builds import LLAMA, built, outputs
from emulated_device import RUBBISH
from emulated_streams import DEVICE
from plan_maker import FakePlan, Request

from tokenspeed.device import launched, placement, step_inputs
from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.handle import StepFailed, StepResult
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.decoder import Decoder


@pytest.fixture(scope="module")
def made() -> Iterator[DeviceBuild]:
    build = built(LLAMA, "npu")
    yield build
    build.handle.shutdown()


def short() -> list[Request]:
    return [Request(prompt=[3, 4, 5], row=1, max_new_tokens=2)]


def test_a_plain_decode_has_one_copy_each_way_and_waits_for_no_more(made: DeviceBuild) -> None:
    seen: list[tuple[list[str], int]] = []

    def watch(plan: FakePlan, _result: StepResult) -> None:
        if plan.kind.all():
            seen.append(([where for where, _ in DEVICE.copies], DEVICE.waits))
        DEVICE.copies.clear()
        DEVICE.waits = 0

    with DEVICE.watching():  # 20 tokens: a second block joins the table on the way
        outputs(made, [Request(prompt=[3, 4, 5], row=1, max_new_tokens=17)], overlap=0, watch=watch)
    assert len(seen) == 16
    # One wait is for what was uploaded by the step before, which has long left, one for the result.
    assert all(found == (["to device", "to host"], 2) for found in seen)


def test_more_changes_than_a_step_has_room_for_go_before_it(made: DeviceBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [Request(prompt=list(range(1, 60)), row=row, max_new_tokens=3, chunk=32) for row in (1, 2)]
    expected = outputs(made, [Request(prompt=r.prompt, row=r.row, max_new_tokens=3, chunk=32) for r in batch])
    monkeypatch.setattr(step_inputs, "_CHANGES", 1)
    with DEVICE.watching():
        assert outputs(made, batch) == expected


def test_every_decode_of_a_size_reads_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[tuple[int, ...]]] = {}
    forward = Decoder.forward

    def noted(self: Decoder, batch: ForwardBatch) -> torch.Tensor:
        hidden = forward(self, batch)
        (attention,) = batch.attention
        rows: Any = attention.decode  # type: ignore[attr-defined]
        if not attention.extend_tokens:  # type: ignore[attr-defined]
            tensors = [batch.input_ids, batch.positions, *batch.slots, rows.pages, rows.lengths, hidden]
            seen.setdefault(rows.count, []).append(tuple(tensor.data_ptr() for tensor in tensors))
        return hidden

    monkeypatch.setattr(Decoder, "forward", noted)  # before the build: what decodes is bound there
    lengths, made = {1: 9, 2: 7, 3: 4}, built(LLAMA, "npu")
    outputs(made, [Request(prompt=[7], row=row, max_new_tokens=length) for row, length in lengths.items()])
    made.handle.shutdown()
    assert all(len(seen[rows]) > 1 for rows in (1, 2, 3))
    assert all(len(set(found)) == 1 for found in seen.values())


def planted(of: Callable[[torch.Tensor], object]) -> Callable[..., torch.Tensor]:
    """A forward that does ``of`` with its result besides."""
    forward = Decoder.forward

    def both(self: Decoder, batch: ForwardBatch) -> torch.Tensor:
        hidden = forward(self, batch)
        of(hidden)
        return hidden

    return both


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x[0].tolist(),
    "cpu": lambda x: x.cpu(),
    "truth": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 0],
    "repeats": lambda x: torch.repeat_interleave(x[:, 0], (x[:, 0] > 0).int()),
    "pageable": lambda x: torch.zeros(x.shape).copy_(x, non_blocking=True),
    "from the host": lambda x: torch.zeros(x.shape).to(x.device, non_blocking=True),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_hidden_wait_is_found(made: DeviceBuild, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "forward", planted(WAITS[name]))
    outputs(made, short())
    with DEVICE.watching(), pytest.raises(StepFailed, match="makes the host wait"):
        outputs(made, short())


MIXTURES: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda x: x + torch.ones(x.shape),
    "index": lambda x: x[torch.zeros(1, dtype=torch.int64)],
    "in place": lambda x: torch.zeros(x.shape).add_(x),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_tensor_of_the_host_is_found(made: DeviceBuild, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "forward", planted(MIXTURES[name]))
    with pytest.raises(StepFailed, match="MixedDevices"):
        outputs(made, short())


def test_inputs_that_are_written_while_they_are_copied_are_found(
    made: DeviceBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement.Twin, "begin", lambda self: None)
    chunked = [Request(prompt=list(range(1, 20)), row=1, max_new_tokens=2, chunk=5)]  # steps without a result
    with pytest.raises(StepFailed, match="ChangedUnderway"):
        outputs(made, chunked)


def test_a_result_that_is_read_before_it_landed_is_found(made: DeviceBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    result = launched._result

    def noted(*arguments: Any) -> StepResult:
        found = result(*arguments)
        read.extend(found.tokens.tolist())
        return found

    monkeypatch.setattr(launched, "_result", noted)
    outputs(made, short())
    rubbish = int.from_bytes(bytes([RUBBISH] * 4), "little", signed=True)
    assert rubbish not in read
    monkeypatch.setattr(placement.Landing, "wait", lambda self: None)
    with suppress(StepFailed, ValueError):  # what comes of such a token is another matter
        outputs(made, short())
    assert rubbish in read or -1 in read  # rubbish for a flag is a NaN, whose token is -1
