"""What the sampler takes for the rows of a step that draw a token, in the memory of the step's inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.step_memory import Packing, Pair, aligned

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

DTYPES: Mapping[str, type[np.float32 | np.int32 | np.int64]] = {
    **dict.fromkeys(FLOATS, np.float32),
    "top_k": np.int32,
    "choice": np.int32,
    "seed": np.int64,
}
"""The parameters of a row, by their names in SamplingParameters."""

_OTHERS = 5


@dataclass(frozen=True, slots=True)
class BatchParameters:
    """The parameters of S rows, in batch order; names and meaning as in SamplingParameters.

    float32 [S], but top_k and choice int32 [S], seed int64 [S].
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    repetition_penalty: torch.Tensor
    top_k: torch.Tensor
    choice: torch.Tensor
    seed: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Of S rows. Written on the host before the step is uploaded; the tensors have it behind that.

    Attributes:
        rows: int64 [S], pool rows.
        last_token: int64 [S], where among the step's tokens the hidden state is that the token is drawn from.
        positions: int32 [S], the index that the token will have in its sequence.
        penalty_slots: int32 [S], of the penalties' counts; written where a row has a penalty.
        mask_slots: int32 [S], of the constraints' masks, -1 for none; written where a row has a constraint.
        parameters: of each row.
        parameter_arrays: the same on the host, by name.
        end: the byte behind all of them.
    """

    rows: Pair[np.int64]
    last_token: Pair[np.int64]
    positions: Pair[np.int32]
    penalty_slots: Pair[np.int32]
    mask_slots: Pair[np.int32]
    parameters: BatchParameters
    parameter_arrays: Mapping[str, NDArray[np.generic]]
    end: int

    @staticmethod
    def nbytes(rows: int) -> int:
        """What so many rows take at most."""
        return (len(DTYPES) + _OTHERS) * aligned(8 * rows)

    @staticmethod
    def within(packing: Packing, rows: int) -> "SamplingRows":
        """The next part of ``packing``, for so many rows."""
        pool_rows, last_token = (packing.take(np.int64, rows) for _ in range(2))
        positions, penalty_slots, mask_slots = (packing.take(np.int32, rows) for _ in range(3))
        each = {name: packing.take(dtype, rows) for name, dtype in DTYPES.items()}
        return SamplingRows(
            rows=pool_rows,
            last_token=last_token,
            positions=positions,
            penalty_slots=penalty_slots,
            mask_slots=mask_slots,
            parameters=BatchParameters(**{name: pair.tensor for name, pair in each.items()}),
            parameter_arrays={name: pair.host for name, pair in each.items()},
            end=packing.end,
        )
