"""Pools the hidden states of prompts whose embedding is asked for. Runs on the forward thread only."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.handle import RowStart
from tokenspeed.device.step_inputs import Step
from tokenspeed.messages import Pooling


@dataclass(frozen=True, slots=True)
class Pooled:
    """What one step gave.

    Attributes:
        vectors: row of the step to float32 [H], a copy; see StepResult.pooled.
        ends: rows of the step whose prompt is computed with it; they draw no token.
        broken: rows of the step whose vector holds what is no finite number; they have none.
    """

    vectors: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)


class Pooler:
    """Knows which pool rows are pooled, and how."""

    def __init__(self) -> None:
        self._rows: dict[int, Pooling] = {}

    def begin(self, start: RowStart) -> None:
        """A request begins (again) in a pool row, which may have been another's."""
        if start.pooling is None:
            self._rows.pop(start.row, None)
        else:
            self._rows[start.row] = start.pooling

    def pool(self, hidden: torch.Tensor, step: Step) -> Pooled:
        """Pools the rows of ``step`` that ask for it; ``hidden`` float32 [T, H] are the step's final hidden states."""
        pooled = Pooled()
        if not self._rows:
            return pooled
        ending = set(step.sampling.tolist())
        for place, row in enumerate(step.rows[: step.num_extends].tolist()):
            pooling = self._rows.get(row)
            if pooling is None:
                continue
            last = int(step.last_token[place])
            if place in ending:
                pooled.ends.append(place)
            if pooling == "mean":
                vector = hidden[last + 1 - int(step.input_len[place]) : last + 1].sum(dim=0).numpy()
            elif place in ending:
                vector = hidden[last].numpy().copy()
            else:
                continue
            if np.isfinite(vector).all():
                pooled.vectors[place] = vector
            else:
                pooled.broken.append(place)
        return pooled
