"""The sampling parameters of every pool row, as arrays from which a batch is gathered."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.messages import SamplingParameters

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


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


class RowParameters:
    """Parameters by pool row; ``gather`` copies those of a batch into buffers that stay where they are."""

    def __init__(self, num_rows: int, max_batch: int) -> None:
        dtypes: dict[str, type[np.generic]] = dict.fromkeys(_FLOATS, np.float32)
        dtypes |= {"top_k": np.int32, "choice": np.int32, "seed": np.int64}
        self._rows: dict[str, NDArray[np.generic]] = {name: np.zeros(num_rows, dtype) for name, dtype in dtypes.items()}
        self._buffers = {name: torch.from_numpy(np.zeros(max_batch, dtype)) for name, dtype in dtypes.items()}
        self._views: dict[int, BatchParameters] = {}
        for row in range(num_rows):
            self.set(row, SamplingParameters())

    def set(self, row: int, parameters: SamplingParameters) -> None:
        """``row`` begins with ``parameters``."""
        for name in _FLOATS:
            self._rows[name][row] = getattr(parameters, name)
        self._rows["top_k"][row] = parameters.top_k
        self._rows["choice"][row] = parameters.choice
        # Seeds are 64 bits; those above the signed range keep their bits.
        self._rows["seed"][row] = (parameters.seed + (1 << 63)) % (1 << 64) - (1 << 63)

    def gather(self, rows: NDArray[np.intp]) -> BatchParameters:
        """The parameters of ``rows``, in that order; overwritten by the next call."""
        count = rows.shape[0]
        for name, values in self._rows.items():
            np.take(values, rows, out=self._buffers[name].numpy()[:count], mode="clip")
        views = self._views.get(count)
        if views is None:
            views = BatchParameters(**{name: buffer[:count] for name, buffer in self._buffers.items()})
            self._views[count] = views
        return views
