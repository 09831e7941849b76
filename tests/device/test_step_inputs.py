"""A plan becomes positions, slots and token ids; -1 stands for what the row drew last."""

import numpy as np
import pytest
import torch
from plan_maker import Delta, FakePlan, ints

from tokenspeed.device.block_tables import BlockTables
from tokenspeed.device.placement import HOST
from tokenspeed.device.step_inputs import Padded, Step, StepInputs

GRANULARITY = 4


@pytest.fixture
def inputs() -> StepInputs:
    tables = BlockTables(HOST, group_id="g", num_rows=5, num_slots=3, num_blocks=40)
    entries = ([1, 3, 4], [0, 0, 0], [3, 2, 1], [0, 0, 0], [1, 1, 1], [10, 11, 12, 30, 31, 20])
    tables.apply(Delta(*(ints(column) for column in entries)))
    return StepInputs(HOST, [tables], [GRANULARITY], max_rows=4, max_tokens=16, vocab_size=100)


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


def step_of(inputs: StepInputs, plan: FakePlan, padded: Padded = lambda tokens, _prefilling: tokens) -> Step:
    step = inputs.build(plan, np.flatnonzero(plan.samples), padded)
    inputs.upload(step)
    return step


def drew(inputs: StepInputs, rows: list[int], tokens: list[int], nan: list[bool] | None = None) -> None:
    none = torch.tensor(nan or [False] * len(rows))
    inputs.remember(torch.tensor(rows), torch.tensor(tokens, dtype=torch.int32), none)


def decode(rows: list[int], positions: list[int]) -> FakePlan:
    ones = ints([1] * len(rows))
    return FakePlan(
        row=ints(rows), kind=ones, input_len=ones, prefix_len=ints(positions), samples=ones,
        input_ids=ints([-1] * len(rows)),
    )  # fmt: skip


def test_a_mixed_batch(inputs: StepInputs) -> None:
    drew(inputs, [1, 4], [7, 8])
    step = step_of(inputs, mixed())
    assert step.num_extends == 1
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 9, 0]
    assert step.slots[0].tolist() == [30 * 4 + 2, 30 * 4 + 3, 31 * 4, 31 * 4 + 1, 31 * 4 + 2, 12 * 4 + 1, 20 * 4]
    assert step.input_ids.tolist() == [50, 51, 52, 53, 54, 7, 8]
    assert step.last_token.tolist() == [4, 5, 6]
    assert step.sampling.tolist() == [1, 2]
    assert step.seq_lens.tolist() == [7, 10, 1]
    assert step.rows_tensor.tolist() == [3, 1, 4]
    assert step.input_len_host.tolist() == step.input_len_tensor.tolist() == [5, 1, 1]
    assert step.prefix_len_host.tolist() == step.prefix_len_tensor.tolist() == [2, 9, 0]


def addresses(step: Step) -> list[int]:
    drawing = step.drawing
    tensors = [
        step.input_ids, step.positions, *step.slots, step.rows_tensor, step.input_len_tensor, step.prefix_len_tensor,
        step.seq_lens, drawing.rows.tensor, drawing.last_token.tensor, drawing.positions.tensor,
        drawing.penalty_slots.tensor, drawing.mask_slots.tensor, drawing.parameters.temperature,
        drawing.parameters.seed,
    ]  # fmt: skip
    return [tensor.data_ptr() for tensor in tensors]


def test_a_decode_only_batch_keeps_its_addresses(inputs: StepInputs) -> None:
    first = step_of(inputs, decode([1, 3], [8, 5]))
    found = addresses(first)
    assert len(set(found)) == len(found) and all(address % 16 == 0 for address in found)
    assert first.positions.tolist() == [8, 5]
    step_of(inputs, mixed())
    second = step_of(inputs, decode([4, 1], [3, 11]))
    assert addresses(second) == found
    assert second.input_ids is first.input_ids and second.slots is first.slots
    assert second.slots[0].tolist() == [20 * 4 + 3, 12 * 4 + 3]
    assert second.last_token.tolist() == [0, 1]


def test_a_row_that_drew_nothing_gives_a_valid_id_to_a_step_queued_behind_it(inputs: StepInputs) -> None:
    drew(inputs, [1, 4], [77, 8], [True, False])
    assert step_of(inputs, mixed()).input_ids.tolist()[-2:] == [0, 8]


def test_the_last_token_of_a_row_that_begins_again_is_told(inputs: StepInputs) -> None:
    drew(inputs, [1, 4], [7, 8])
    inputs.tell(4, 9)
    assert step_of(inputs, mixed()).input_ids.tolist()[-2:] == [7, 9]


def test_padded_rows_of_a_decode_are_nobodys(inputs: StepInputs) -> None:
    step_of(inputs, mixed())
    drew(inputs, [1, 4], [7, 8])
    step = step_of(inputs, decode([1, 4], [8, 2]), lambda _tokens, _prefilling: 4)
    assert step.input_ids.tolist() == [7, 8, 0, 0]
    assert step.positions.tolist() == [8, 2, 0, 0]
    assert step.slots[0].tolist() == [12 * 4, 20 * 4 + 2, 0, 0]
    assert step.seq_lens.tolist() == [9, 3] and step.rows_tensor.tolist() == [1, 4]
    again = step_of(inputs, decode([3], [2]), lambda _tokens, _prefilling: 4)
    assert again.input_ids is step.input_ids and again.slots is step.slots
    assert again.input_ids.tolist() == [0, 0, 0, 0] and again.of_own().positions.tolist() == [2]


def test_padded_tokens_of_a_prefill_come_behind_all_rows(inputs: StepInputs) -> None:
    step = step_of(inputs, mixed(), lambda tokens, prefilling: 4 * tokens if prefilling == 0 else 10)
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 9, 0, 0, 0, 0] and step.tokens == 7
    own = step.of_own()
    assert own.positions.data_ptr() == step.positions.data_ptr() and own.slots[0].tolist() == step.slots[0].tolist()[:7]
    plain = step_of(inputs, mixed())
    assert plain.of_own() is plain
