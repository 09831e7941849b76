"""Cache operations of a plan, on the real device side over a tiny model: their order, their outcomes, their tiers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_maker import Delta, FakeOperation, FakePlan, PlanMaker, Request, collect, ints, run
from thread_ranks import thread_ranks
from tiny_models import build, random_config, resolved

from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.cache_arena import ArenaLayout, CacheArena
from tokenspeed.device.cache_operations import CacheOperations, StepCopies
from tokenspeed.device.handle import DeviceHandle, OperationOutcome, RowStart, StepFailed, StepResult
from tokenspeed.device.launched import Batch, LaunchedStep
from tokenspeed.device.placement import HOST
from tokenspeed.device.sizing import MemoryPlanError
from tokenspeed.layers.communication import ALONE
from tokenspeed.messages import SamplingParameters
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig
from tokenspeed_scheduler import OperationKind

GRANULARITY = 16
BLOCK = 2 * 2 * 2 * GRANULARITY * 16 * 4  # layers, fields, heads, tokens, dim, float32
PROMPT = list(range(3, 3 + GRANULARITY + 4))
DIGESTS = np.arange(64, dtype=np.uint8).reshape(2, 32)


def config_of(*, host_blocks: int = 8, storage: Path | None = None, seed: int = 0) -> ResolvedConfig:
    config = resolved(ModelSource(kind="random", random_config=random_config(), seed=seed), max_len=128)
    kv = config.kv.model_copy(
        update={"host_bytes": (host_blocks + 1) * BLOCK, "storage_dir": str(storage or ""), "storage_bytes": 1 << 20}
    )
    return config.model_copy(update={"kv": kv})


@pytest.fixture
def device() -> Iterator[DeviceBuild]:
    made = build(config_of())
    yield made
    made.handle.shutdown()


def operation(
    kind: OperationKind, source: list[int], target: list[int], *, op_id: int = 1, keys: bool = False
) -> FakeOperation:
    """An operation on blocks of the one group; with ``keys`` the first of DIGESTS name them."""
    count = max(len(source), len(target), 1 if keys else 0)
    made = FakeOperation(op_id, kind, ints([0] * count), ints(source), ints(target))
    return replace(made, digests=DIGESTS[:count], offsets=ints([0] * count)) if keys else made


def execute(handle: DeviceHandle, plan: FakePlan, starts: list[RowStart] | None = None) -> StepResult:
    return handle.execute(plan, starts or []).result()  # type: ignore[arg-type]


def outcomes(result: StepResult) -> dict[int, list[int] | None]:
    assert len({one.op_id for one in result.operations}) == len(result.operations)
    return {one.op_id: None if one.succeeded is None else one.succeeded.tolist() for one in result.operations}


def start_of(prompt: list[int], row: int) -> list[RowStart]:
    return [RowStart(handle=row, row=row, sampling=SamplingParameters(top_k=1), prompt=ints(prompt), output=ints())]


def with_prefix(block: int, *, row: int = 2, operations: list[FakeOperation] | None = None) -> FakePlan:
    """The last four tokens of PROMPT in ``row``, behind a cached prefix in ``block``; the rest goes to block 9."""
    return FakePlan(
        row=ints([row]),
        kind=ints([0]),
        input_len=ints([4]),
        prefix_len=ints([GRANULARITY]),
        prompt_len=ints([len(PROMPT)]),
        samples=ints([1]),
        input_ids=ints(PROMPT[GRANULARITY:]),
        tables=[Delta(*(ints(values) for values in ([row], [0], [2], [0], [1], [block, 9])))],
        operations=operations or [],
    )


def first_token(handle: DeviceHandle) -> int:
    """Prefills PROMPT in row 1, blocks 1 and 2, and returns the token behind it."""
    return run(handle, [Request(prompt=PROMPT, row=1, max_new_tokens=1)], granularity=GRANULARITY)[0][0]


def storage_outcomes(handle: DeviceHandle) -> list[OperationOutcome]:
    """The next storage operations that end."""
    while not (found := handle.finished_operations()):
        pass
    return found


def test_a_block_is_saved_and_given_away_in_one_plan_and_restored_elsewhere(device: DeviceBuild) -> None:
    expected = first_token(device.handle)
    other = [7] * GRANULARITY
    taken = FakePlan(
        row=ints([3]),
        kind=ints([0]),
        input_len=ints([GRANULARITY]),
        prefix_len=ints([0]),
        prompt_len=ints([GRANULARITY]),
        samples=ints([1]),
        input_ids=ints(other),
        tables=[Delta(*(ints(values) for values in ([3], [0], [1], [0], [1], [1])))],
        zero_blocks=[ints([1])],
        operations=[operation(OperationKind.IMAGE_SAVE, [1], [5], op_id=7)],
    )
    assert outcomes(execute(device.handle, taken, start_of(other, 3))) == {7: None}
    spoilt = execute(device.handle, with_prefix(1), start_of(PROMPT, 2))
    assert spoilt.tokens[0] != expected
    restored = with_prefix(6, operations=[operation(OperationKind.RESTORE, [5], [6], op_id=8)])
    result = execute(device.handle, restored, start_of(PROMPT, 2))
    assert (result.tokens.tolist(), outcomes(result)) == ([expected], {8: None})


def test_the_order_within_a_step_is_save_zero_copy_load(device: DeviceBuild) -> None:
    """Each of the four reads what the one before left: only this order gives the right block to the batch."""
    expected = first_token(device.handle)
    plan = with_prefix(4)
    plan.operations = [
        operation(OperationKind.LOAD_BACK, [2], [4], op_id=1),
        operation(OperationKind.WRITE_BACK, [1], [2], op_id=2),
    ]
    plan.zero_blocks = [ints([1])]  # after the save, before the copy
    plan.copy_blocks = [np.array([[1, 4]], np.int32)]  # zeros, over which the load goes
    result = execute(device.handle, plan, start_of(PROMPT, 2))
    assert (result.tokens.tolist(), outcomes(result)) == ([expected], {1: None, 2: None})


def test_a_plan_with_operations_and_no_rows_has_a_result(device: DeviceBuild) -> None:
    first_token(device.handle)
    plan = FakePlan(forward_id=0, operations=[operation(OperationKind.WRITE_BACK, [1, 2], [3, 4])])
    result = execute(device.handle, plan)
    assert (result.forward_id, result.tokens.size, outcomes(result)) == (0, 0, {1: None})


def test_a_copy_that_fails_is_an_outcome_and_the_step_goes_on(device: DeviceBuild) -> None:
    expected = first_token(device.handle)
    plan = with_prefix(1)
    plan.operations = [
        operation(OperationKind.WRITE_BACK, [1, 2, 1], [3, 99, 4], op_id=1),
        operation(OperationKind.LOAD_BACK, [3], [-1], op_id=2),
    ]
    result = execute(device.handle, plan, start_of(PROMPT, 2))
    assert result.tokens.tolist() == [expected]
    assert outcomes(result) == {1: [1, 0, 1], 2: [0]}


@pytest.mark.parametrize("kind", [OperationKind.HAND_OFF, OperationKind.REMOTE_PREFILL, OperationKind.STORAGE_PUT])
def test_what_this_device_side_has_no_tier_for_fails(device: DeviceBuild, kind: OperationKind) -> None:
    plan = FakePlan(forward_id=0, operations=[operation(kind, [1], [1], op_id=4)])
    assert outcomes(execute(device.handle, plan)) == {4: [0]}
    assert device.handle.finished_operations() == []


def test_without_a_host_pool_every_copy_fails() -> None:
    plain = build(resolved(ModelSource(kind="random", random_config=random_config())))
    assert (plain.specs.host_parents, plain.specs.host_bytes, plain.specs.storage) == (0, 0, False)
    kinds = (OperationKind.WRITE_BACK, OperationKind.IMAGE_SAVE, OperationKind.LOAD_BACK, OperationKind.RESTORE)
    plan = FakePlan(forward_id=0, operations=[operation(kind, [1], [1], op_id=kind + 1) for kind in kinds])
    assert outcomes(execute(plain.handle, plan)) == {kind + 1: [0] for kind in kinds}
    plain.handle.shutdown()


def test_ranks_finish_a_step_at_once_where_they_have_outcomes_to_agree_on() -> None:
    """No rank launches another step while one waits in that exchange."""
    write_back = operation(OperationKind.WRITE_BACK, [1], [1])
    config = config_of()
    model = read_model_config(config.model)
    groups = architecture(model.architecture).cache_groups(model, granularity=GRANULARITY)
    arena = CacheArena(HOST, ArenaLayout.of(groups, torch.float32), num_parents=2)
    for rank, expected in ((thread_ranks(2)[1], [True, False]), (ALONE, [True, True])):
        operations = CacheOperations(HOST, arena, None, None, rank)
        found = []
        for planned in ([], [write_back]):
            copies = operations.save(planned)  # type: ignore[arg-type]
            found.append(launched(operations, copies).may_wait)
        assert found == expected


def launched(operations: CacheOperations, copies: StepCopies) -> LaunchedStep:
    return LaunchedStep(
        forward_id=1,
        batch=Batch(),
        sampler=None,  # type: ignore[arg-type]  # nothing is drawn
        operations=operations,
        copies=copies,
        times=(0.0,) * 5,
        overlapped=False,
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(top_k=1, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
        SamplingParameters(temperature=1.2, seed=5, choice=1, frequency_penalty=1.0),
        SamplingParameters(top_k=1, min_tokens=7, stop_token_ids=(5, 6), logit_bias={9: 2.0}),
    ],
)
def test_a_request_that_was_restored_goes_on_as_if_it_had_never_left(
    device: DeviceBuild, sampling: SamplingParameters
) -> None:
    """The whole slot state is in the RowStart: blocks through the host, another row, first row a decode of id -1."""
    whole = Request(prompt=PROMPT, row=1, max_new_tokens=9, sampling=sampling)
    (expected,) = run(device.handle, [whole], granularity=GRANULARITY)
    maker = PlanMaker(GRANULARITY)
    request = Request(prompt=PROMPT, row=2, max_new_tokens=9, sampling=sampling)
    for _ in range(4):
        plan, starts = maker.plan([request])
        collect(plan, execute(device.handle, plan, starts), [request])
    assert request.output == expected[:4]
    held = request.blocks[0]
    saved = FakePlan(operations=[operation(OperationKind.IMAGE_SAVE, held, [3, 4])], zero_blocks=[ints(held)])
    execute(device.handle, saved)
    request.row, request.versions, request.blocks = 3, [], []
    plan, starts = maker.plan([request])
    assert starts == [] and plan.kind.tolist() == [1] and plan.input_ids.tolist() == [-1]
    back = request.blocks[0][:2]
    plan.operations = [operation(OperationKind.RESTORE, [3, 4], back)]
    start = RowStart(handle=3, row=3, sampling=sampling, prompt=ints(PROMPT), output=ints(request.output))
    collect(plan, execute(device.handle, plan, [start]), [request])
    while not request.is_done:
        plan, _ = maker.plan([request])
        collect(plan, execute(device.handle, plan), [request])
    assert request.output == expected


def test_blocks_outlive_the_device_side_in_the_storage(tmp_path: Path) -> None:
    first = build(config_of(storage=tmp_path))
    assert (first.specs.host_parents, first.specs.host_bytes, first.specs.storage) == (8, 9 * BLOCK, True)
    expected = first_token(first.handle)
    plan = FakePlan(
        operations=[
            operation(OperationKind.WRITE_BACK, [1, 2], [3, 4], op_id=1),
            operation(OperationKind.STORAGE_PUT, [3, 4], [], op_id=2, keys=True),
        ]
    )
    assert outcomes(execute(first.handle, plan)) == {1: None}
    assert storage_outcomes(first.handle) == [OperationOutcome(op_id=2)]
    first.handle.shutdown()

    second = build(config_of(storage=tmp_path))
    found = operation(OperationKind.STORAGE_QUERY, [], [], op_id=1, keys=True)
    fetched = operation(OperationKind.STORAGE_FETCH, [], [7], op_id=2, keys=True)
    for one in (found, fetched):
        execute(second.handle, FakePlan(operations=[one]))
        assert storage_outcomes(second.handle) == [OperationOutcome(op_id=one.op_id)]
    plan = with_prefix(5, operations=[operation(OperationKind.LOAD_BACK, [7], [5], op_id=3)])
    assert execute(second.handle, plan, start_of(PROMPT, 2)).tokens.tolist() == [expected]
    second.handle.shutdown()

    other = build(config_of(storage=tmp_path, seed=1))
    execute(other.handle, FakePlan(operations=[found]))
    (missing,) = storage_outcomes(other.handle)
    assert missing.succeeded is not None and missing.succeeded.tolist() == [0]
    other.handle.shutdown()


def test_a_put_that_was_queued_is_made_before_the_end(tmp_path: Path) -> None:
    device = build(config_of(storage=tmp_path))
    first_token(device.handle)
    plan = FakePlan(
        operations=[
            operation(OperationKind.WRITE_BACK, [1], [3], op_id=1),
            operation(OperationKind.STORAGE_PUT, [3], [], op_id=2, keys=True),
        ]
    )
    device.handle.execute(plan, [])  # type: ignore[arg-type]
    device.handle.shutdown()
    assert len([path for path in tmp_path.rglob("*.attention.0") if path.is_file()]) == 1
    assert device.handle.finished_operations() == []


def test_a_step_that_fails_leaves_its_storage_operations_running(tmp_path: Path) -> None:
    device = build(config_of(storage=tmp_path))
    plan = with_prefix(1)
    plan.input_ids = ints([1, 2, 3, 128])
    plan.operations = [operation(OperationKind.STORAGE_QUERY, [], [], op_id=6, keys=True)]
    with pytest.raises(StepFailed, match="vocabulary"):
        execute(device.handle, plan, start_of(PROMPT, 2))
    assert [one.op_id for one in storage_outcomes(device.handle)] == [6]
    device.handle.shutdown()


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"host_bytes": 2 * BLOCK - 1}, r"kv\.host_bytes is 0\.\d+ GiB, the least host pool is two parents of"),
        ({"storage_dir": "/nowhere"}, "kv.storage_dir needs kv.host_bytes"),
        ({"host_bytes": 4 * BLOCK, "storage_dir": "/dev/null/x"}, r"kv\.storage_dir: /dev/null/x cannot be written"),
        ({"host_bytes": 4 * BLOCK, "storage_dir": "/tmp", "storage_bytes": 100}, "raise --storage-gb"),
    ],
)
def test_tiers_that_cannot_be_are_refused_by_name(update: dict[str, object], words: str) -> None:
    config = resolved(ModelSource(kind="random", random_config=random_config()))
    with pytest.raises(ValueError, match=words) as caught:
        build(config.model_copy(update={"kv": config.kv.model_copy(update=update)}))
    assert isinstance(caught.value, MemoryPlanError) or "storage" in str(caught.value)
