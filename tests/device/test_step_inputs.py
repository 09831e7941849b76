"""A plan becomes positions, slots and token ids; -1 stands for what the row drew last."""

import numpy as np
import pytest
from plan_maker import Delta, FakePlan, ints

from tokenspeed.device.block_tables import BlockTables
from tokenspeed.device.step_inputs import StepInputs

GRANULARITY = 4


@pytest.fixture
def inputs() -> StepInputs:
    tables = BlockTables(group_id="g", num_rows=5, num_slots=3, num_blocks=40)
    entries = ([1, 3, 4], [0, 0, 0], [3, 2, 1], [0, 0, 0], [1, 1, 1], [10, 11, 12, 30, 31, 20])
    tables.apply(Delta(*(ints(column) for column in entries)))
    return StepInputs([tables], [GRANULARITY], max_rows=4, max_tokens=16, vocab_size=100)


def mixed() -> FakePlan:
    """Row 3 prefills positions 2 to 6, row 1 decodes position 9, row 4 decodes position 0."""
    return FakePlan(
        row=ints([3, 1, 4]),
        kind=ints([0, 1, 1]),
        input_len=ints([5, 1, 1]),
        prefix_len=ints([2, 9, 0]),
        samples=ints([0, 1, 1]),
        input_ids=ints([50, 51, 52, 53, 54, -1, -1]),
    )


def test_a_mixed_batch(inputs: StepInputs) -> None:
    inputs.remember(np.array([1, 4]), ints([7, 8]))
    step = inputs.build(mixed())
    assert step.num_extends == 1
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 9, 0]
    assert step.slots[0].tolist() == [30 * 4 + 2, 30 * 4 + 3, 31 * 4, 31 * 4 + 1, 31 * 4 + 2, 12 * 4 + 1, 20 * 4]
    assert step.input_ids.tolist() == [50, 51, 52, 53, 54, 7, 8]
    assert step.last_token.tolist() == [4, 5, 6]
    assert step.sampling.tolist() == [1, 2]
    assert step.seq_lens.tolist() == [7, 10, 1]
    assert step.rows_tensor.tolist() == [3, 1, 4]


def test_a_decode_only_batch_keeps_its_addresses(inputs: StepInputs) -> None:
    def decode(rows: list[int], positions: list[int]) -> FakePlan:
        ones = ints([1] * len(rows))
        return FakePlan(
            row=ints(rows),
            kind=ones,
            input_len=ones,
            prefix_len=ints(positions),
            samples=ones,
            input_ids=ints([-1] * len(rows)),
        )

    first = inputs.build(decode([1, 3], [8, 5]))
    addresses = [first.positions.data_ptr(), first.input_ids.data_ptr(), first.slots[0].data_ptr()]
    assert first.positions.tolist() == [8, 5]
    inputs.build(mixed())
    second = inputs.build(decode([4, 1], [3, 11]))
    assert [second.positions.data_ptr(), second.input_ids.data_ptr(), second.slots[0].data_ptr()] == addresses
    assert second.slots[0].tolist() == [20 * 4 + 3, 12 * 4 + 3]
    assert second.last_token.tolist() == [0, 1]


def test_a_row_that_drew_nothing_gives_a_valid_id_to_a_step_queued_behind_it(inputs: StepInputs) -> None:
    inputs.remember(np.array([1, 4]), ints([-1, 8]))
    assert inputs.build(mixed()).input_ids.tolist()[-2:] == [0, 8]
