"""Which rows of a step are pooled, how, and what becomes of vectors that are no numbers."""

import numpy as np
import torch
from plan_maker import FakePlan, ints

from tokenspeed.device.block_tables import BlockTables
from tokenspeed.device.handle import RowStart
from tokenspeed.device.placement import HOST, Landing
from tokenspeed.device.pooling import Pooled, Pooler, pooled
from tokenspeed.device.step_inputs import StepInputs
from tokenspeed.messages import Pooling, SamplingParameters

HIDDEN = torch.arange(24, dtype=torch.float32).view(8, 3)
"""Of 8 tokens: row t is 3t, 3t + 1, 3t + 2."""


def start_of(row: int, pooling: Pooling | None) -> RowStart:
    empty = np.zeros(0, np.int32)
    return RowStart(handle=9, row=row, sampling=SamplingParameters(), prompt=empty, output=empty, pooling=pooling)


def begun(**rows: Pooling | None) -> Pooler:
    """A pooler whose pool rows ``r1``, ``r2`` ... began with these poolings."""
    pooler = Pooler()
    for name, pooling in rows.items():
        pooler.begin(start_of(int(name[1:]), pooling))
    return pooler


def pool(
    pooler: Pooler, hidden: torch.Tensor, rows: list[int], lengths: list[int], *, extends: int, sampling: list[int]
) -> Pooled:
    """The step of rows with so many tokens each, of which the first ``extends`` prefill and those of ``sampling`` have
    no further input."""
    ones = ints([1] * len(rows))
    kinds = ints([0] * extends + [1] * (len(rows) - extends))
    plan = FakePlan(
        row=ints(rows), kind=kinds, input_len=ints(lengths), prefix_len=0 * ones, input_ids=ints([0] * sum(lengths))
    )
    tables = BlockTables(HOST, group_id="g", num_rows=6, num_slots=1, num_blocks=2)
    inputs = StepInputs(HOST, [tables], [8], max_rows=8, max_tokens=16, vocab_size=9)
    ends = pooler.ends(plan, np.array(sampling))
    step = inputs.build(plan, np.setdiff1d(sampling, ends), lambda tokens, _prefilling: tokens)
    landing = Landing(HOST)
    vectors = pooler.pool(hidden, step, ends, landing)
    landing.wait()
    return pooled(vectors, ends)


def test_a_chunk_of_each_kind() -> None:
    """Pool rows 1 and 2 end their prompts, 3 and 4 go on with theirs, 5 draws a token."""
    pooler = begun(r1="last", r2="mean", r3="last", r4="mean", r5=None)
    found = pool(pooler, HIDDEN, [1, 2, 3, 4, 5], [2, 2, 1, 2, 1], extends=4, sampling=[0, 1, 4])
    assert {place: vector.tolist() for place, vector in found.vectors.items()} == {
        0: [3.0, 4.0, 5.0],
        1: [6.0 + 9.0, 7.0 + 10.0, 8.0 + 11.0],
        3: [15.0 + 18.0, 16.0 + 19.0, 17.0 + 20.0],
    }
    assert found.ends == [0, 1] and found.broken == []


def test_vectors_outlive_the_buffer_they_came_from() -> None:
    hidden = HIDDEN.clone()
    found = pool(begun(r1="last", r2="mean"), hidden, [1, 2], [1, 1], extends=2, sampling=[0, 1])
    hidden.zero_()
    assert [vector.tolist() for vector in found.vectors.values()] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_what_is_no_finite_number_breaks_its_row_only() -> None:
    hidden = HIDDEN.clone()
    hidden[0, 1], hidden[3, 2] = float("nan"), float("inf")
    pooler = begun(r1="mean", r2="last", r3="last")
    found = pool(pooler, hidden, [1, 2, 3], [2, 2, 2], extends=3, sampling=[0, 1, 2])
    assert found.broken == [0, 1] and list(found.vectors) == [2] and found.ends == [0, 1, 2]


def test_a_row_that_another_request_took_over_is_not_pooled() -> None:
    pooler = begun(r1="last")
    pooler.begin(start_of(1, None))
    found = pool(pooler, HIDDEN, [1], [1], extends=1, sampling=[0])
    assert not found.vectors and not found.ends


def test_a_decoding_row_is_never_pooled() -> None:
    found = pool(begun(r1="last"), HIDDEN, [1], [1], extends=0, sampling=[0])
    assert not found.vectors and not found.ends
