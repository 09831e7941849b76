"""One draw of a sampler on the host's own memory, as a step makes it."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.placement import HOST, Landing, Twin
from tokenspeed.device.sampling.rows import SamplingRows
from tokenspeed.device.sampling.sampler import Sampled, Sampler
from tokenspeed.device.step_memory import Packing


def draw_once(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int] | NDArray[np.int32]
) -> Sampled:
    """A token for each of the pool rows ``rows`` from ``logits`` float32 [S, V], which stays as it is."""
    into = SamplingRows.within(Packing(Twin(HOST, SamplingRows.nbytes(len(rows)))), len(rows))
    into.positions.host[:] = positions
    draw, landing = sampler.prepare(np.array(rows, np.intp), into), Landing(HOST)
    sampler.draw(draw, logits.clone(), landing)
    landing.wait()
    return sampler.finish(draw)
