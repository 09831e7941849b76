"""What the demo's clients saw, in the figures of LatencySnapshot."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tokenspeed.messages.snapshot import LatencySnapshot, QuantileSnapshot

WINDOW_S = 60.0


@dataclass
class Answer:
    """One answer on its way: when it was asked for, what is done with it, tokens and when they came (seconds)."""

    asked: float
    then: Callable[[list[int]], None] | None
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    queue_s: float = -1.0


class Answered:
    """The answers that ended in the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, Answer]] = deque()

    def add(self, answer: Answer, now: float) -> None:
        """One ended now."""
        self._ended.append((now, answer))

    def latency(self, now: float) -> LatencySnapshot:
        """What they were like."""
        while self._ended and self._ended[0][0] < now - WINDOW_S:
            self._ended.popleft()
        answers = [answer for _, answer in self._ended if answer.arrivals]
        return LatencySnapshot(
            requests=len(self._ended),
            ttft_ms=_quantiles([answer.arrivals[0] - answer.asked for answer in answers]),
            inter_token_ms=_quantiles([b - a for answer in answers for a, b in pairwise(answer.arrivals)]),
            end_to_end_ms=_quantiles([answer.arrivals[-1] - answer.asked for answer in answers]),
            queue_ms=_quantiles([answer.queue_s for answer in answers if answer.queue_s >= 0]),
        )


def _quantiles(seconds: list[float]) -> QuantileSnapshot | None:
    if not seconds:
        return None
    p50, p90, p99 = (1e3 * np.quantile(seconds, [0.5, 0.9, 0.99])).tolist()
    return QuantileSnapshot(p50=p50, p90=p90, p99=p99)
