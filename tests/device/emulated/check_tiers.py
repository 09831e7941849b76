"""Copies between the emulated device and the host pool: in their place in a step, and whole when it ends."""

from collections.abc import Iterator

import pytest
from emulated_builds import GRANULARITY, LLAMA, built
from emulated_streams import DEVICE, MAIN, Stream
from plan_maker import Delta, FakeOperation, FakePlan, ints

from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.handle import RowStart, StepResult
from tokenspeed.messages import SamplingParameters
from tokenspeed_scheduler import OperationKind

PROMPT = list(range(3, 3 + GRANULARITY + 4))
"""In blocks 1 and 2."""


def built_with_host_pool(device: str) -> DeviceBuild:
    return built(LLAMA, device, host_bytes=1 << 20)


@pytest.fixture(scope="module")
def made() -> Iterator[DeviceBuild]:
    build = built_with_host_pool("npu")
    yield build
    build.handle.shutdown()


def execute(build: DeviceBuild, plan: FakePlan, starts: list[RowStart]) -> StepResult:
    return build.handle.execute(plan, starts).result()  # type: ignore[arg-type]


def prefilled(build: DeviceBuild) -> int:
    """Computes PROMPT in pool row 1; the token that follows."""
    plan = FakePlan(
        row=ints([1]), kind=ints([0]), input_len=ints([len(PROMPT)]), prefix_len=ints([0]), samples=ints([1]),
        input_ids=ints(PROMPT), tables=[Delta(*map(ints, ([1], [0], [2], [0], [1], [1, 2])))], zero_blocks=[ints()],
    )  # fmt: skip
    return int(execute(build, plan, [start()]).tokens[0])


def start() -> RowStart:
    sampling = SamplingParameters(top_k=1)
    return RowStart(handle=1, row=1, sampling=sampling, prompt=ints(PROMPT), output=ints())


def moved(build: DeviceBuild, token: int, into: tuple[int, int] = (5, 4)) -> tuple[list[int], StepResult]:
    """In one step: saves both blocks, zeroes them, loads them into others and decodes there."""
    plan = FakePlan(
        row=ints([1]), kind=ints([1]), input_len=ints([1]), prefix_len=ints([len(PROMPT)]), samples=ints([1]),
        input_ids=ints([token]), tables=[Delta(*map(ints, ([1], [0], [2], [1], [2], into)))],
        zero_blocks=[ints([1, 2])],
        operations=[
            FakeOperation(1, OperationKind.WRITE_BACK, ints([0, 0]), ints([1, 2]), ints([1, 2])),
            FakeOperation(2, OperationKind.LOAD_BACK, ints([0, 0]), ints([1, 2]), ints(into)),
        ],
    )  # fmt: skip
    result = execute(build, plan, [])
    return result.tokens.tolist(), result


@pytest.fixture(scope="module")
def expected() -> tuple[int, list[int]]:
    host = built_with_host_pool("cpu")
    token = prefilled(host)
    found = moved(host, token)[0]
    host.handle.shutdown()
    return token, found


def test_blocks_are_saved_given_away_and_loaded_within_a_step(
    made: DeviceBuild, expected: tuple[int, list[int]]
) -> None:
    with DEVICE.watching():
        token = prefilled(made)
        tokens, result = moved(made, token)
    assert (token, tokens) == expected
    assert [(one.op_id, one.succeeded) for one in result.operations] == [(1, None), (2, None)]
    assert not DEVICE.underway, "an outcome is told when its copy is done"


def test_copies_and_step_wait_for_each_other(made: DeviceBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []
    wait_stream = Stream.wait_stream

    def noted(self: Stream, other: Stream) -> None:
        waits.append(tuple("step" if stream is MAIN else "copies" for stream in (self, other)))  # type: ignore[arg-type]
        wait_stream(self, other)

    token = prefilled(made)
    monkeypatch.setattr(Stream, "wait_stream", noted)
    moved(made, token)
    assert waits == [("copies", "step"), ("step", "copies")] * 2


def test_a_step_that_does_not_wait_for_copies_is_found(
    made: DeviceBuild, expected: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is zeroed before, and what is loaded is not there yet."""
    token = prefilled(made)
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    assert moved(made, token, (7, 6))[0] != expected[1]


def test_a_copy_that_nobody_waited_for_is_found(made: DeviceBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    token = prefilled(made)
    monkeypatch.setattr("tokenspeed.device.cache_operations.CacheOperations.end", lambda self, copies: None)
    plan = FakePlan(operations=[FakeOperation(3, OperationKind.WRITE_BACK, ints([0]), ints([1]), ints([1]))])
    plan.zero_blocks = [ints()]
    assert token >= 0 and execute(made, plan, []).operations
    assert DEVICE.underway
