"""What the loop tells the scheduler of cache operations, and when; the scheduler here only records and plays back."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from control_plane import submit
from memory_channel import MemoryChannel
from plan_maker import FakeOperation, FakePlan, ints

from tokenspeed.device.handle import OperationOutcome, RowStart, StepFailed, StepResult, StepTimings
from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.engine.loop import BLOCKED_WAIT_MS, IDLE_WAIT_MS, EventLoop
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.messages import EngineInput
from tokenspeed_scheduler import Abort, Event, ForwardResult, Note, OperationDone, OperationKind, RequestRow, Tick

SPECS = DeviceSpecs(
    groups=(), prefix_granularity=4, num_parents=4, kv_tokens=0, arena_bytes=0, host_parents=4, host_bytes=0,
    storage=True, weight_bytes=0, workspace_bytes=0, untouched_bytes=0, vocab_size=9, max_model_len=99,
    max_num_seqs=2, device="test",
    kernels={}, kernel_doubts={},
)  # fmt: skip
TIMINGS = StepTimings(queued=0.0, prepare=0.0, forward=0.0, sample=0.0)


class PlaybackScheduler:
    """Plans what it was given, in order, then nothing; remembers each batch of events."""

    def __init__(self, *plans: FakePlan) -> None:
        self.plans = list(plans)
        self.batches: list[list[Event]] = []
        self.works = False

    def submit(self, handle: int, prompt: np.ndarray, **_: object) -> None:
        self.works = True

    def advance(self, events: Sequence[Event]) -> None:
        self.batches.append(list(events))

    def plan(self) -> FakePlan:
        return self.plans.pop(0) if self.plans else FakePlan(forward_id=0)

    def has_work(self) -> bool:
        return self.works

    def snapshot(self) -> SimpleNamespace:
        names = (
            "prefix_query_tokens", "prefix_hit_tokens", "retractions", "ignored_results", "host_hit_tokens",
            "storage_hit_tokens", "evictions", "host_evictions", "image_blocks", "restores", "recomputed_tokens",
            "storage_timeouts", "pending_operations", "running", "waiting", "live",
        )  # fmt: skip
        empty: dict[str, object] = {"groups": [], "host": [], "flows": [], "states": np.zeros(12, np.int64)}
        return SimpleNamespace(**empty, **dict.fromkeys(names, 0))

    def requests(self, limit: int) -> list[RequestRow]:
        return []

    def set_time(self, seconds: float) -> None:
        """It stamps nothing."""

    def headroom(self) -> SimpleNamespace:
        return SimpleNamespace(tokens=0, largest=0, requests=0, typical_tokens=0)

    def take_notes(self) -> list[Note]:
        return []


class PlaybackStep:
    def __init__(self, forward_id: int, outcome: Callable[[], StepResult]) -> None:
        self.forward_id = forward_id
        self.result = outcome

    def done(self) -> bool:
        return True


class PlaybackHandle:
    """Every copy succeeds but those in ``failing``; ``finished`` are the storage operations to report next."""

    def __init__(self) -> None:
        self.executed: list[FakePlan] = []
        self.starts: list[RowStart] = []
        self.failing: dict[int, np.ndarray] = {}
        self.finished: list[OperationOutcome] = []
        self.broken = False

    def execute(self, plan: FakePlan, starts: Sequence[RowStart]) -> PlaybackStep:
        self.executed.append(plan)
        self.starts += starts
        return PlaybackStep(plan.forward_id, lambda: self._result(plan))

    def _result(self, plan: FakePlan) -> StepResult:
        if self.broken:
            raise StepFailed("planted")
        return StepResult(
            forward_id=plan.forward_id,
            tokens=np.full(plan.num_rows, 5, np.int32),
            nan=np.zeros(plan.num_rows, np.bool_),
            operations=tuple(
                OperationOutcome(op_id=one.op_id, succeeded=self.failing.get(one.op_id))
                for one in plan.operations
                if one.kind not in (OperationKind.STORAGE_QUERY, OperationKind.STORAGE_PUT)
            ),
            timings=TIMINGS,
        )

    def finished_operations(self) -> list[OperationOutcome]:
        finished, self.finished = self.finished, []
        return finished

    def storage_usage(self) -> None:
        """There is none."""

    def shutdown(self) -> None:
        """Nothing to end."""


class PatientChannel(MemoryChannel):
    """Remembers how long the loop was ready to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.patience: list[int] = []

    def receive(self, timeout_ms: int) -> list[EngineInput]:
        self.patience.append(timeout_ms)
        return super().receive(timeout_ms)


class Stage:
    def __init__(self, *plans: FakePlan, overlap: int = 0, storage: bool = True) -> None:
        self.scheduler = PlaybackScheduler(*plans)
        self.handle = PlaybackHandle()
        self.channel = PatientChannel()
        self.now = 10.0
        self.statistics = EngineStatistics(SPECS, role="fused")
        self.loop = EventLoop(
            scheduler=self.scheduler,  # type: ignore[arg-type]
            handle=self.handle,  # type: ignore[arg-type]
            channel=self.channel,
            statistics=self.statistics,
            max_model_len=99,
            overlap=overlap,
            storage=storage,
            clock=lambda: self.now,
        )

    def round(self) -> tuple[list[Event], list[Event]]:
        """Makes a round; returns the events of its head and of its tail."""
        before = len(self.scheduler.batches)
        self.loop.round()
        head, tail = self.scheduler.batches[before:]
        return head, tail


def moving(kind: OperationKind, op_id: int, count: int = 1, handle: int = 0) -> FakeOperation:
    ids = ints(range(1, count + 1))
    digests = np.zeros((count, 32), np.uint8)
    return FakeOperation(op_id, kind, ints([0] * count), ids, ids, digests, ints([0] * count), handle)


def decode(handle: int, *operations: FakeOperation, forward_id: int = 1, start: bool = False) -> FakePlan:
    return FakePlan(
        forward_id=forward_id,
        row=ints([handle]),
        kind=ints([1]),
        input_len=ints([1]),
        prefix_len=ints([3]),
        prompt_len=ints([3]),
        samples=ints([1]),
        input_ids=ints([-1]),
        starts=ints([0] if start else []),
        operations=list(operations),
    )


def kinds(events: Sequence[Event]) -> list[type]:
    return [type(event) for event in events]


def done(events: Sequence[Event]) -> dict[int, list[int] | None]:
    found = [event for event in events if isinstance(event, OperationDone)]
    return {one.op_id: None if one.succeeded is None else one.succeeded.tolist() for one in found}


def test_a_round_has_two_advances_and_storage_operations_end_at_its_head() -> None:
    stage = Stage()
    stage.handle.finished = [OperationOutcome(op_id=4), OperationOutcome(op_id=3, succeeded=np.array([1, 0], np.uint8))]
    head, tail = stage.round()
    assert kinds(head) == [Tick, OperationDone, OperationDone]
    assert head[0].now == 10_000
    assert done(head) == {4: None, 3: [1, 0]}
    assert tail == []
    stage.now = 10.25
    assert [event.now for event in stage.round()[0]] == [10_250]


def test_without_a_storage_there_is_no_time_and_nobody_asks_for_operations() -> None:
    stage = Stage(storage=False)
    stage.handle.finished = [OperationOutcome(op_id=4)]
    assert stage.round() == ([], [])
    assert len(stage.handle.finished) == 1


def test_copies_end_at_the_tail_before_the_result_of_their_step() -> None:
    stage = Stage(decode(1, moving(OperationKind.WRITE_BACK, 6), moving(OperationKind.RESTORE, 7, handle=2)))
    head, tail = stage.round()
    assert kinds(head) == [Tick]
    assert kinds(tail) == [OperationDone, OperationDone, ForwardResult]
    assert done(tail) == {6: None, 7: None}


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_plan_with_operations_and_no_rows_is_executed_and_ends_in_its_round(overlap: int) -> None:
    stage = Stage(FakePlan(forward_id=0, operations=[moving(OperationKind.IMAGE_SAVE, 2, 3)]), overlap=overlap)
    _, tail = stage.round()
    assert len(stage.handle.executed) == 1
    assert kinds(tail) == [OperationDone]  # and no result: no forward has the number 0
    assert stage.statistics.steps == 0


def test_an_empty_plan_is_not_executed() -> None:
    stage = Stage()
    stage.round()
    assert stage.handle.executed == []


def test_the_loop_waits_briefly_while_a_storage_operation_is_out() -> None:
    stage = Stage(FakePlan(forward_id=0, operations=[moving(OperationKind.STORAGE_PUT, 9)]))
    for _ in range(4):
        stage.round()
    # Nothing to do; the plan of the round before may be followed by another at once; then the put is out.
    assert stage.channel.patience == [IDLE_WAIT_MS, 0, BLOCKED_WAIT_MS, BLOCKED_WAIT_MS]
    stage.handle.finished = [OperationOutcome(op_id=9)]
    stage.round()
    stage.round()
    assert stage.channel.patience[-1] == IDLE_WAIT_MS


def test_a_drain_waits_for_what_is_to_be_stored() -> None:
    put = FakePlan(forward_id=0, operations=[moving(OperationKind.STORAGE_PUT, 9)])
    stage = Stage(FakePlan(forward_id=0, operations=[moving(OperationKind.WRITE_BACK, 8)]), put)
    stage.channel.send_in(drain=True)
    stage.channel.send_in()
    rounds = 0

    def finish_late() -> list[OperationOutcome]:
        nonlocal rounds
        rounds += 1
        return [OperationOutcome(op_id=9)] if rounds == 10 else []

    stage.handle.finished_operations = finish_late  # type: ignore[method-assign]
    stage.round()
    stage.loop.run()
    assert rounds >= 10
    assert [one.op_id for plan in stage.handle.executed for one in plan.operations] == [8, 9]


def test_a_step_that_fails_fails_its_copies_and_not_its_storage_operations() -> None:
    operations = (moving(OperationKind.IMAGE_SAVE, 5, 3), moving(OperationKind.STORAGE_PUT, 6))
    stage = Stage(decode(1, *operations))
    stage.handle.broken = True
    _, tail = stage.round()
    assert kinds(tail) == [OperationDone, ForwardResult]
    assert done(tail) == {5: [0, 0, 0]}
    assert stage.statistics.failed_copies == 1


def test_a_request_whose_blocks_did_not_come_ends_with_an_error() -> None:
    """Its row read nonsense: no token of it goes out, and what it filled is not published."""
    load = moving(OperationKind.LOAD_BACK, 5, 2, handle=1)
    stage = Stage(decode(1, load, start=True))
    stage.channel.send_in(submits=[submit(1, [1, 2, 3])])
    stage.handle.failing = {5: np.array([1, 0], np.uint8)}
    _, tail = stage.round()
    assert kinds(tail) == [OperationDone, ForwardResult, Abort]
    assert done(tail) == {5: [1, 0]}
    assert stage.channel.tokens(1) == []
    assert stage.channel.last(1).error_code == "cache_load_failed"
    assert stage.statistics.failed_copies == 1


def test_a_write_back_that_fails_ends_nobody() -> None:
    stage = Stage(decode(1, moving(OperationKind.WRITE_BACK, 5, handle=1), start=True))
    stage.channel.send_in(submits=[submit(1, [1, 2, 3])])
    stage.handle.failing = {5: np.array([0], np.uint8)}
    _, tail = stage.round()
    assert kinds(tail) == [OperationDone, ForwardResult]
    assert stage.channel.tokens(1) == [5]


def test_a_start_may_be_a_decode_and_brings_prompt_and_output() -> None:
    stage = Stage(decode(1, start=True), decode(1, forward_id=2), decode(1, forward_id=3, start=True))
    stage.channel.send_in(submits=[submit(1, [1, 2, 3])])
    for _ in range(3):
        stage.round()
    first, again = stage.handle.starts
    assert (first.prompt.tolist(), first.output.tolist()) == ([1, 2, 3], [])
    assert (again.prompt.tolist(), again.output.tolist()) == ([1, 2, 3], [5, 5])
    assert stage.channel.outputs[0].cached_tokens == 3
    assert [output.cached_tokens for output in stage.channel.outputs[1:]] == [-1, -1]
