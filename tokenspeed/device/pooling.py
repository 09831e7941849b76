"""Pools the hidden states of prompts whose embedding is asked for. Runs on the forward thread only."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.handle import RowStart
from tokenspeed.device.placement import Landing
from tokenspeed.device.step_inputs import Step
from tokenspeed.messages import Pooling

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan


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

    def ends(self, plan: "Plan", sampling: NDArray[np.intp]) -> list[int]:
        """Of the rows of ``plan`` that would draw a token (``sampling``), those whose pooled prompt is computed with
        it: they draw none."""
        if not self._rows:
            return []
        prefills = set(np.flatnonzero(plan.kind == 0).tolist())
        rows = plan.row.tolist()
        return [place for place in sampling.tolist() if place in prefills and rows[place] in self._rows]

    def pool(
        self, hidden: torch.Tensor, step: Step, ends: list[int], landing: Landing
    ) -> dict[int, NDArray[np.float32]]:
        """Pools the rows of ``step`` that ask for it, of which ``ends`` are computed with it; ``hidden`` float32 [T, H]
        are the step's final hidden states. Each row's vector float32 [H], there once ``landing`` has it."""
        vectors: dict[int, NDArray[np.float32]] = {}
        if not self._rows:
            return vectors
        for place, row in enumerate(step.rows[: step.num_extends].tolist()):
            pooling, last = self._rows.get(row), int(step.last_token[place])
            if pooling == "mean":
                first = last + 1 - int(step.input_len[place])
                vectors[place] = landing.take(hidden[first : last + 1].sum(dim=0))
            elif pooling is not None and place in ends:
                vectors[place] = landing.take(hidden[last])
        return vectors


def pooled(vectors: dict[int, NDArray[np.float32]], ends: list[int]) -> Pooled:
    """The outcome, once the vectors have landed."""
    found = Pooled(ends=ends)
    for place, vector in vectors.items():
        if np.isfinite(vector).all():
            found.vectors[place] = vector.copy()
        else:
            found.broken.append(place)
    return found
