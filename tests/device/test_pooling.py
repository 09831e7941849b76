"""Which rows of a step are pooled, how, and what becomes of vectors that are no numbers."""

import numpy as np
import torch

from tokenspeed.device.handle import RowStart
from tokenspeed.device.pooling import Pooler
from tokenspeed.device.step_inputs import Step
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


def step_of(rows: list[int], lengths: list[int], *, extends: int, sampling: list[int]) -> Step:
    nothing = torch.zeros(0)
    return Step(
        rows=np.array(rows),
        num_extends=extends,
        input_len=np.array(lengths, np.int32),
        prefix_len=np.zeros(len(rows), np.int32),
        last_token=np.cumsum(lengths) - 1,
        sampling=np.array(sampling),
        input_ids=nothing,
        positions=nothing,
        slots=(),
        rows_tensor=nothing,
        input_len_tensor=nothing,
        prefix_len_tensor=nothing,
        seq_lens=nothing,
    )


def test_a_chunk_of_each_kind() -> None:
    """Pool rows 1 and 2 end their prompts, 3 and 4 go on with theirs, 5 draws a token."""
    pooler = begun(r1="last", r2="mean", r3="last", r4="mean", r5=None)
    pooled = pooler.pool(HIDDEN, step_of([1, 2, 3, 4, 5], [2, 2, 1, 2, 1], extends=4, sampling=[0, 1, 4]))
    assert {place: vector.tolist() for place, vector in pooled.vectors.items()} == {
        0: [3.0, 4.0, 5.0],
        1: [6.0 + 9.0, 7.0 + 10.0, 8.0 + 11.0],
        3: [15.0 + 18.0, 16.0 + 19.0, 17.0 + 20.0],
    }
    assert pooled.ends == [0, 1] and pooled.broken == []


def test_vectors_outlive_the_buffer_they_came_from() -> None:
    hidden = HIDDEN.clone()
    pooled = begun(r1="last", r2="mean").pool(hidden, step_of([1, 2], [1, 1], extends=2, sampling=[0, 1]))
    hidden.zero_()
    assert [vector.tolist() for vector in pooled.vectors.values()] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_what_is_no_finite_number_breaks_its_row_only() -> None:
    hidden = HIDDEN.clone()
    hidden[0, 1], hidden[3, 2] = float("nan"), float("inf")
    pooler = begun(r1="mean", r2="last", r3="last")
    pooled = pooler.pool(hidden, step_of([1, 2, 3], [2, 2, 2], extends=3, sampling=[0, 1, 2]))
    assert pooled.broken == [0, 1] and list(pooled.vectors) == [2] and pooled.ends == [0, 1, 2]


def test_a_row_that_another_request_took_over_is_not_pooled() -> None:
    pooler = begun(r1="last")
    pooler.begin(start_of(1, None))
    pooled = pooler.pool(HIDDEN, step_of([1], [1], extends=1, sampling=[0]))
    assert not pooled.vectors and not pooled.ends
