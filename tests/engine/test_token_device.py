"""The token device of several groups notices what a real one would: it is the witness of the scheduler's tests."""

from collections.abc import Sequence

import numpy as np
import pytest
from plan_maker import Delta, FakeOperation, FakePlan, ints
from token_cache import MemoryStorage, group
from token_device import TokenDevice, expected_tokens

from tokenspeed.device.handle import RowStart, StepFailed
from tokenspeed.messages import SamplingParameters
from tokenspeed_scheduler import OperationKind

GROUPS = (
    group("full", "full_history", 4),
    group("window", "sliding_window", 2, children=2, window=3),
    group("state", "state", 0, checkpoint=4),
)
FULL, WINDOW, STATE = range(3)
PROMPT = [5, 6, 7, 8, 9, 10]


def made(**settings: object) -> TokenDevice:
    values: dict[str, object] = {"host_parents": 8, **settings}
    return TokenDevice(granularity=4, num_blocks=9, max_num_seqs=3, max_model_len=40, groups=GROUPS, **values)  # type: ignore[arg-type]


def plan(
    tokens: Sequence[int], prefix: int, tables: Sequence[tuple[int, list[int]]], *, version: int, row: int = 1
) -> FakePlan:
    """One row that computes ``tokens`` behind ``prefix``; ``tables``: (first slot, ids) of each group, all replaced."""
    deltas = [
        Delta(ints([row]), ints([first]), ints([len(ids)]), ints([version]), ints([version + 1]), ints(ids))
        for first, ids in tables
    ]
    one = [ints([value]) for value in (row, 0, len(tokens), prefix, len(PROMPT), 1)]
    return FakePlan(
        version + 1, *one, input_ids=ints(tokens), tables=deltas, zero_blocks=[ints()] * 3,
        copy_blocks=[np.zeros((0, 2), np.int32)] * 3,
    )  # fmt: skip


def start(row: int = 1, output: Sequence[int] = ()) -> list[RowStart]:
    sampling = SamplingParameters()
    return [RowStart(handle=1, row=row, sampling=sampling, prompt=ints(PROMPT), output=ints(output))]


def execute(device: TokenDevice, one: FakePlan, starts: Sequence[RowStart] = ()) -> int:
    return int(device.execute(one, starts).result().tokens[0])  # type: ignore[arg-type]


def two_chunks(
    *, window: Sequence[int] = (0, 7, 8), state: tuple[list[int], list[int]] = ([0, 8], [8, 9]), full: int = 2
) -> int:
    """Four tokens, then two: window blocks 6, 7 (parent 3) and then 7, 8, states in parents 8 and 9."""
    device = made()
    execute(device, plan(PROMPT[:4], 0, [(0, [1]), (0, [6, 7]), (0, state[0])], version=0), start())
    return execute(device, plan(PROMPT[4:], 4, [(1, [full]), (0, [*window]), (0, state[1])], version=1))


def test_what_is_right_gives_the_expected_token() -> None:
    (expected,) = expected_tokens(PROMPT, 1, GROUPS)
    assert two_chunks() == expected
    assert two_chunks(state=([0, 8], [0, 8])) == expected  # goes on in its live block
    assert two_chunks(window=[6, 7, 8]) == expected  # a block before the window does not hurt
    assert expected != expected_tokens(PROMPT, 1)[0]


def test_a_wrong_window_block_or_state_changes_the_token_or_stops_the_step() -> None:
    (expected,) = expected_tokens(PROMPT, 1, GROUPS)
    assert two_chunks(window=[0, 6, 8]) != expected
    assert two_chunks(state=([0, 8], [9, 8])) != expected  # starts from a block that was never written
    assert two_chunks(full=1) != expected  # written over what the first chunk left
    with pytest.raises(StepFailed) as caught:
        two_chunks(window=[0, 0, 8])  # a hole inside the window
    assert "null parent of group window" in str(caught.value.__cause__)


def test_what_only_the_first_tokens_of_a_chunk_see_counts_too() -> None:
    """Blocks that the last token does not see still made the entries of those before it."""
    (expected,) = expected_tokens([*PROMPT, 11, 12, 13, 14], 1, GROUPS)
    for hidden, right in ((7, True), (6, False)):
        device = made()
        execute(device, plan(PROMPT[:4], 0, [(0, [1]), (0, [6, 7]), (0, [0, 8])], version=0), start())
        device._sequence[1] += [11, 12, 13, 14]
        device._sequence[1].remove(device.last[1])
        rest = [*PROMPT[4:], 11, 12, 13, 14]
        tables = [(1, [2, 4]), (0, [0, hidden, 10, 11, 14]), (0, [0, 8])]
        assert (execute(device, plan(rest, 4, tables, version=1)) == expected) is right


def test_a_parent_given_to_two_groups_spoils_one_of_them() -> None:
    device = made()
    one = plan(PROMPT, 0, [(0, [1, 2]), (0, [2, 3, 10]), (0, [0, 8])], version=0)  # blocks 2 and 3 are parent 1
    assert execute(device, one, start()) != expected_tokens(PROMPT, 1, GROUPS)[0]


def operation(kind: OperationKind, which: int, source: list[int], target: list[int], op_id: int) -> FakeOperation:
    count = len(source)
    digests = np.arange(32 * count, dtype=np.uint8).reshape(count, 32)
    return FakeOperation(
        op_id, kind, ints([which] * count), ints(source), ints(target), digests, ints([0] * count), handle=1
    )


def empty_plan(*operations: FakeOperation) -> FakePlan:
    none = np.zeros((0, 2), np.int32)
    return FakePlan(
        0, tables=[Delta()] * 3, zero_blocks=[ints()] * 3, copy_blocks=[none] * 3, operations=list(operations)
    )


@pytest.mark.parametrize("lost", [None, FULL, WINDOW, STATE])
def test_a_request_comes_back_from_host_and_storage_into_other_blocks(lost: int | None) -> None:
    """Saved, put, fetched by another device, restored there; without one of the groups the next token is wrong."""
    storage = MemoryStorage()
    first, second, third = expected_tokens(PROMPT, 3, GROUPS)
    device = made(storage=storage)
    tables = [(0, [1, 2]), (0, [6, 7, 10]), (0, [0, 8])]
    assert execute(device, plan(PROMPT, 0, tables, version=0), start()) == first
    moves = {FULL: ([1, 2], [3, 4]), WINDOW: ([7, 10], [10, 11]), STATE: ([8], [6])}
    kept = {which: ids for which, ids in moves.items() if which != lost}
    saves = [operation(OperationKind.IMAGE_SAVE, which, *ids, which + 1) for which, ids in kept.items()]
    puts = [operation(OperationKind.STORAGE_PUT, which, ids[1], ids[0], which + 4) for which, ids in kept.items()]
    outcome = device.execute(empty_plan(*saves, *puts), []).result()  # type: ignore[arg-type]
    assert [one.op_id for one in outcome.operations] == [one.op_id for one in saves]
    assert [one.op_id for one in device.finished_operations()] == [one.op_id for one in puts]

    other = made(storage=storage)
    back = {FULL: [5, 6], WINDOW: [4, 5], STATE: [1]}
    fetches = [operation(OperationKind.STORAGE_FETCH, which, ids, ids, which + 1) for which, ids in back.items()]
    other.execute(empty_plan(*fetches), []).result()  # type: ignore[arg-type]
    found = other.finished_operations()
    assert [one.succeeded.any() for one in found if one.succeeded is not None] == [
        which != lost for which in (FULL, WINDOW, STATE)
    ]
    again = plan([first], len(PROMPT), [(0, [8, 9]), (0, [0, 7, 4, 5]), (0, [0, 6])], version=0, row=2)
    restored = {FULL: [8, 9], WINDOW: [7, 4], STATE: [6]}
    again.operations = [
        operation(OperationKind.RESTORE, which, back[which], restored[which], 9 + which) for which in back
    ]
    again.input_ids = ints([-1])
    assert (execute(other, again, start(2, [first])) == second) is (lost is None)
    assert other.starts[0].output.tolist() == [first]
    if lost is None:
        last = plan([-1], len(PROMPT) + 1, [(2, []), (4, []), (2, [])], version=1, row=2)
        assert execute(other, last) == third


def test_a_planted_failure_moves_nothing_and_is_told() -> None:
    device = made()
    device.cache.fail_copy = lambda one: one.op_id == 2
    first, second = (operation(OperationKind.WRITE_BACK, FULL, [1], [op_id], op_id) for op_id in (1, 2))
    device.cache.device.block(FULL, 1)[:] = 77
    outcome = device.execute(empty_plan(first, second), []).result()  # type: ignore[arg-type]
    assert [None if one.succeeded is None else one.succeeded.tolist() for one in outcome.operations] == [None, [0]]
    assert (device.cache.host.block(FULL, 1)[0], device.cache.host.block(FULL, 2)[0]) == (77, -1)
    assert device.cache.blocks[OperationKind.WRITE_BACK] == 2


def test_storage_operations_wait_where_the_storage_does_not_answer() -> None:
    device = made(storage=MemoryStorage())
    device.storage_answers = False
    query = operation(OperationKind.STORAGE_QUERY, FULL, [1, 2], [], 3)
    device.execute(empty_plan(query), []).result()  # type: ignore[arg-type]
    assert device.finished_operations() == []
    device.storage_answers = True
    (outcome,) = device.finished_operations()
    assert (outcome.op_id, outcome.succeeded.tolist()) == (3, [0, 0])  # type: ignore[union-attr]
