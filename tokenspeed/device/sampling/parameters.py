"""The sampling parameters of every pool row, as arrays from which a batch is gathered."""

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.sampling.rows import DTYPES, FLOATS, SamplingRows
from tokenspeed.messages import SamplingParameters


class RowParameters:
    """Parameters by pool row, on the host; ``gather`` writes those of a batch into the step's inputs."""

    def __init__(self, num_rows: int) -> None:
        self._rows: dict[str, NDArray[np.generic]] = {name: np.zeros(num_rows, dtype) for name, dtype in DTYPES.items()}
        for row in range(num_rows):
            self.set(row, SamplingParameters())

    def set(self, row: int, parameters: SamplingParameters) -> None:
        """``row`` begins with ``parameters``."""
        for name in FLOATS:
            self._rows[name][row] = getattr(parameters, name)
        self._rows["top_k"][row] = parameters.top_k
        self._rows["choice"][row] = parameters.choice
        # Seeds are 64 bits; those above the signed range keep their bits.
        self._rows["seed"][row] = (parameters.seed + (1 << 63)) % (1 << 64) - (1 << 63)

    def most_kept(self, rows: NDArray[np.intp]) -> int:
        """The largest top-k of ``rows``; 0 where one of them keeps all, or there are none."""
        kept = self._rows["top_k"][rows]
        return int(kept.max()) if kept.size and kept.all() else 0

    def gather(self, rows: NDArray[np.intp], into: SamplingRows) -> None:
        """Writes the parameters of ``rows``, in that order."""
        for name, values in self._rows.items():
            np.take(values, rows, out=into.parameter_arrays[name], mode="clip")
