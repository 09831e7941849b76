"""The slot rule, in one place: where the keys and values of a position are written."""

import numpy as np
from numpy.typing import NDArray


def write_slots(
    table: NDArray[np.int32],
    rows: NDArray[np.intp],
    positions: NDArray[np.int32],
    granularity: int,
    out: NDArray[np.int64],
) -> None:
    """Writes to ``out`` [T] the slot of each token: table[row, position // g] * g + position % g.

    ``table`` int32 [pool rows, slots] of block ids, ``rows`` [T] the pool row of each token, ``positions`` int32 [T].
    A position without a block resolves to block 0, the null block, which nobody reads.
    """
    index, offset = np.divmod(positions, granularity)
    np.multiply(table[rows, index], granularity, out=out, dtype=np.int64)
    np.add(out, offset, out=out)
