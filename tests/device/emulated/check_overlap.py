"""A step is launched before the one ahead of it was waited for, on the emulated device: in which order, that all tokens
are the host's, and that whatever the two might share shows."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_builds import GRANULARITY, LLAMA, built, outputs
from emulated_streams import DEVICE
from numpy.typing import NDArray
from plan_maker import Delta, FakeOperation, FakePlan, PlanMaker, Request, ints
from tiny_models import REFERENCE, build, resolved

from tokenspeed.device import placement
from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.cache_operations import CacheOperations
from tokenspeed.device.handle import Grammar, RowStart, StepFailed, StepResult, TokenMatcher
from tokenspeed.device.launched import LaunchedStep
from tokenspeed.device.runner import Runner
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.decoder import Decoder
from tokenspeed.messages import SamplingParameters
from tokenspeed_scheduler import OperationKind


@pytest.fixture(scope="module")
def made() -> Iterator[DeviceBuild]:
    build = built(LLAMA, "npu")
    yield build
    build.handle.shutdown()


def three() -> list[Request]:
    return [Request(prompt=[3 * row, 4, 5], row=row, max_new_tokens=6) for row in (1, 2, 3)]


@pytest.fixture(scope="module")
def host() -> Iterator[DeviceBuild]:
    build = built(LLAMA, "cpu")
    yield build
    build.handle.shutdown()


@pytest.fixture(scope="module")
def expected(host: DeviceBuild) -> list[list[int]]:
    return outputs(host, three(), overlap=0)


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the forward thread did: "forward" when one was queued, "landed" when a result was waited for."""
    found: list[str] = []
    forward, wait = Decoder.forward, placement.Landing.wait

    def noted_forward(self: Decoder, batch: ForwardBatch) -> torch.Tensor:
        found.append("forward")
        return forward(self, batch)

    def noted_wait(self: placement.Landing) -> None:
        found.append("landed")
        wait(self)

    monkeypatch.setattr(Decoder, "forward", noted_forward)
    monkeypatch.setattr(placement.Landing, "wait", noted_wait)
    return found


def test_a_step_is_launched_before_the_one_ahead_of_it_is_waited_for(
    made: DeviceBuild, acts: list[str], expected: list[list[int]]
) -> None:
    overlapped: list[bool] = []
    with DEVICE.watching():
        found = outputs(made, three(), overlap=1, watch=lambda _, result: overlapped.append(result.timings.overlapped))
    assert found == expected
    steps = len(overlapped)
    assert acts == ["forward", *["forward", "landed"] * (steps - 1), "landed"]
    assert overlapped == [False, *[True] * (steps - 1)]


def test_a_result_that_is_read_before_the_next_plan_is_made_leaves_nothing_to_overlap(
    made: DeviceBuild, acts: list[str], expected: list[list[int]]
) -> None:
    assert outputs(made, three(), overlap=0) == expected
    assert acts == ["forward", "landed"] * (len(acts) // 2)


def test_inputs_that_the_next_step_overwrites_too_early_are_found(
    made: DeviceBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement.Twin, "begin", lambda self: None)
    with pytest.raises(StepFailed, match="ChangedUnderway"):
        outputs(made, three(), overlap=1)


def test_results_that_the_next_step_overwrites_too_early_are_found(
    made: DeviceBuild, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece of host memory for the results of all steps: the next one's copy is on its way into it."""
    memory: dict[int, torch.Tensor] = {}

    def take(self: placement.Landing, tensor: torch.Tensor) -> NDArray[Any]:
        size = tensor.numel()
        pinned = memory.setdefault(size, torch.empty(size, dtype=tensor.dtype, pin_memory=True))
        pinned.copy_(tensor, non_blocking=True)
        self._landed.set()
        return pinned.numpy()

    monkeypatch.setattr(placement.Landing, "take", take)
    assert outputs(made, three(), overlap=0) == expected
    assert spoilt(lambda: outputs(made, three(), overlap=1), expected)


def spoilt(run: Callable[[], object], expected: object) -> bool:
    """Whether it comes to anything but ``expected``."""
    try:
        return run() != expected
    except (StepFailed, ValueError, IndexError):
        return True


# Constraints.


class Stepping(Grammar):
    """The next token is the last one, or one of the seven that follow it: what may come hangs on what was drawn."""

    def matcher(self) -> TokenMatcher:
        return _SteppingMatcher()


class _SteppingMatcher(TokenMatcher):
    may_end, error = False, ""

    def __init__(self) -> None:
        self._last = 0

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = 0
        for token in range(self._last, self._last + 8):
            mask.view(np.uint32)[token % 128 // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        self._last = token


def follows(tokens: Sequence[int]) -> bool:
    return all((token - last) % 128 < 8 for last, token in zip([0, *tokens], tokens, strict=False))


@dataclass
class Constraining:
    """A handle that has ``rows`` begin under a constraint, and notes what came of the steps."""

    build: DeviceBuild
    rows: frozenset[int]
    results: list[tuple[FakePlan, StepResult]] = field(default_factory=list)

    @property
    def handle(self) -> "Constraining":
        return self

    @property
    def specs(self) -> Any:
        return self.build.specs

    def execute(self, plan: FakePlan, starts: Sequence[RowStart]) -> Any:
        changed = [replace(each, grammar=Stepping()) if each.row in self.rows else each for each in starts]
        return self.build.handle.execute(plan, changed)  # type: ignore[arg-type]

    def outputs(self, overlap: int) -> list[list[int]]:
        """Row 1 draws long, rows 2 and 3 join it one after the other and end before it."""
        lengths = {1: 12, 2: 5, 3: 4}
        batch = [
            Request(
                prompt=[5, 9, 20 + row],
                row=row,
                max_new_tokens=length,
                sampling=SamplingParameters(temperature=5.0, seed=row),
            )
            for row, length in lengths.items()
        ]
        return outputs(
            self,  # type: ignore[arg-type]
            batch,
            overlap=overlap,
            watch=lambda plan, result: self.results.append((plan, result)),
        )


CONSTRAINED = [frozenset({2}), frozenset({2, 3}), frozenset({1, 3}), frozenset({1, 2, 3})]


@pytest.mark.parametrize("rows", CONSTRAINED, ids=lambda rows: "-".join(map(str, sorted(rows))))
def test_constrained_rows_among_free_ones(made: DeviceBuild, host: DeviceBuild, rows: frozenset[int]) -> None:
    expected = Constraining(host, rows).outputs(0)
    assert {row for row in (1, 2, 3) if follows(expected[row - 1])} == rows
    constraining = Constraining(made, rows)
    with DEVICE.watching():
        assert constraining.outputs(1) == expected
    held = [bool(rows.intersection(plan.row[plan.samples != 0].tolist())) for plan, _ in constraining.results]
    overlapped = [result.timings.overlapped for _, result in constraining.results]
    assert overlapped[0] is False
    # A step waits for the one before where both draw under a constraint, and begins at once where not both do.
    assert overlapped[1:] == [not (before and present) for before, present in pairwise(held)]


def test_a_constrained_step_that_does_not_wait_for_the_token_before_is_found(
    made: DeviceBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = frozenset({2, 3})
    expected = Constraining(made, rows).outputs(0)
    monkeypatch.setattr(Runner, "must_follow", lambda *_: False)
    assert spoilt(lambda: Constraining(made, rows).outputs(1), expected)


# What goes wrong, and the end.


def test_a_launch_that_fails_behind_an_unfinished_step_fails_alone(
    made: DeviceBuild, expected: list[list[int]]
) -> None:
    requests = three()
    maker = PlanMaker(GRANULARITY)
    plan, starts = maker.plan(requests)
    first = made.handle.execute(plan, starts)  # type: ignore[arg-type]
    bad = FakePlan(row=ints([4]), kind=ints([0]), input_len=ints([1]), prefix_len=ints([0]), samples=ints([1]),
                   input_ids=ints([5000]))  # fmt: skip
    second = made.handle.execute(bad, [])  # type: ignore[arg-type]
    plan, starts = maker.plan(requests)
    third = made.handle.execute(plan, starts)  # type: ignore[arg-type]
    assert first.result().tokens.tolist() == [tokens[0] for tokens in expected]
    with pytest.raises(StepFailed, match="has the token 5000"):
        second.result()
    assert third.result().tokens.tolist() == [tokens[1] for tokens in expected]


def test_the_end_of_the_device_side_finishes_what_was_launched(expected: list[list[int]]) -> None:
    device, requests, maker = built(LLAMA, "npu"), three(), PlanMaker(GRANULARITY)
    steps = [device.handle.execute(*maker.plan(requests)) for _ in range(2)]  # type: ignore[arg-type]
    device.handle.shutdown()
    assert [step.result().tokens.tolist() for step in steps] == [[one[step] for one in expected] for step in (0, 1)]


# Copies.

PROMPT = list(range(3, 3 + GRANULARITY + 4))
DIGESTS = np.arange(64, dtype=np.uint8).reshape(2, 32)


def with_storage(folder: Path) -> DeviceBuild:
    config = resolved(LLAMA, kernels=REFERENCE, kv_bytes=8 << 20, granularity=GRANULARITY, chunk=256)
    tiers = {"host_bytes": 1 << 20, "storage_dir": str(folder), "storage_bytes": 1 << 20}
    kv = config.kv.model_copy(update=tiers)
    return build(config.model_copy(update={"kv": kv, "device": "npu"}))


def stored(op_id: int, kind: OperationKind, source: list[int], target: list[int]) -> FakeOperation:
    count = len(source) or len(target)
    plain = FakeOperation(op_id, kind, ints([0] * count), ints(source), ints(target))
    return replace(plain, digests=DIGESTS[:count], offsets=ints([0] * count))


def ended(device: DeviceBuild) -> list[tuple[int, object]]:
    """The next storage operations that end."""
    while not (found := device.handle.finished_operations()):
        pass
    return [(outcome.op_id, outcome.succeeded) for outcome in found]


def saved_and_put(device: DeviceBuild) -> list[int]:
    """Row 1 draws four tokens at overlap 1; with the second its first block is saved and put. Later steps go on while
    that is on its way. Then another row draws behind that block as the storage has it."""
    (request,), maker = [Request(prompt=PROMPT, row=1, max_new_tokens=4)], PlanMaker(GRANULARITY)
    steps: list[Any] = []
    for number in range(4):
        plan, starts = maker.plan([request])
        if number == 1:
            plan.operations = [
                FakeOperation(1, OperationKind.WRITE_BACK, ints([0]), ints([request.blocks[0][0]]), ints([3])),
                stored(2, OperationKind.STORAGE_PUT, [3], []),
            ]
        steps.append(device.handle.execute(plan, starts))  # type: ignore[arg-type]
        if number:
            steps[number - 1].result()
    tokens = [int(step.result().tokens[0]) for step in steps]
    assert [(one.op_id, one.succeeded) for one in steps[1].result().operations] == [(1, None)]
    assert ended(device) == [(2, None)]
    fetch = FakePlan(operations=[stored(3, OperationKind.STORAGE_FETCH, [], [5])], zero_blocks=[ints()])
    device.handle.execute(fetch, []).result()  # type: ignore[arg-type]
    assert ended(device) == [(3, None)]
    again = FakePlan(
        row=ints([2]), kind=ints([0]), input_len=ints([4]), prefix_len=ints([GRANULARITY]), samples=ints([1]),
        input_ids=ints(PROMPT[GRANULARITY:]), tables=[Delta(*map(ints, ([2], [0], [2], [0], [1], [20, 21])))],
        zero_blocks=[ints()], operations=[FakeOperation(4, OperationKind.LOAD_BACK, ints([0]), ints([5]), ints([20]))],
    )  # fmt: skip
    start = RowStart(handle=2, row=2, sampling=SamplingParameters(top_k=1), prompt=ints(PROMPT), output=ints())
    result = device.handle.execute(again, [start]).result()  # type: ignore[arg-type]
    return [*tokens[:1], *result.tokens.tolist()]


def test_what_a_step_saves_is_put_as_it_was(tmp_path: Path) -> None:
    device = with_storage(tmp_path)
    with DEVICE.watching():
        token, again = saved_and_put(device)
    device.handle.shutdown()
    assert again == token


def test_a_put_that_does_not_wait_for_what_it_is_of_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, save = CacheOperations.end, CacheOperations.save

    def hasty(self: CacheOperations, operations: Any) -> Any:
        copies = save(self, operations)
        mark, copies.copied = copies.copied, None
        end(self, copies)
        copies.copied = mark
        deadline = time.monotonic() + 10
        while any(one.kind == OperationKind.STORAGE_PUT for one in operations) and not any(tmp_path.rglob("*.0")):
            assert time.monotonic() < deadline  # its thread reads what there is now
        return copies

    monkeypatch.setattr(CacheOperations, "save", hasty)
    monkeypatch.setattr(CacheOperations, "end", lambda self, copies: copies.copied and copies.copied.wait())
    device = with_storage(tmp_path)
    token, again = saved_and_put(device)
    device.handle.shutdown()
    assert again != token


def test_a_step_that_is_launched_behind_copies_leaves_their_outcome_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's outcomes are told once its own copies are done."""
    device = built(LLAMA, "npu", host_bytes=1 << 20)
    left: list[tuple[int, int]] = []
    finish = LaunchedStep.finish

    def noted(self: LaunchedStep) -> StepResult:
        before = len(DEVICE.underway)
        result = finish(self)
        left.append((before, len(DEVICE.underway)))
        return result

    monkeypatch.setattr(LaunchedStep, "finish", noted)
    steps = []
    for op_id in (1, 2):
        operation = FakeOperation(op_id, OperationKind.WRITE_BACK, ints([0]), ints([op_id]), ints([op_id]))
        plan = FakePlan(operations=[operation], zero_blocks=[ints()])
        steps.append(device.handle.execute(plan, []))  # type: ignore[arg-type]
    assert [step.result().operations[0].op_id for step in steps] == [1, 2]
    device.handle.shutdown()
    assert left == [(2, 1), (1, 0)]
