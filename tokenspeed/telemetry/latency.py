"""What clients waited for over the last minute, in quantiles: counts by size, in a few slices of time."""

import math
import time
from collections import Counter
from collections.abc import Callable

from tokenspeed.messages.snapshot import LatencySnapshot, QuantileSnapshot

WINDOW_S = 60.0
SLICES = 12
RATIO = 1.05
"""A step between two sizes: quantiles are right to within 2.5 %."""

_LOG_RATIO = math.log(RATIO)
_SMALLEST_S = 1e-5


class SlidingQuantiles:
    """Values of the last WINDOW_S, the oldest of which leave a slice at a time. Seconds in, milliseconds out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slices: dict[int, Counter[int]] = {}

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts a value, ``count`` times."""
        bucket = round(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S) / _LOG_RATIO)
        self._now()[bucket] += count

    def count(self) -> int:
        """How many values there are."""
        self._now()
        return sum(sum(counts.values()) for counts in self._slices.values())

    def quantiles(self) -> QuantileSnapshot | None:
        """Returns p50, p90 and p99 in milliseconds; None without a value."""
        self._now()
        counts: Counter[int] = Counter()
        for one in self._slices.values():
            counts.update(one)
        total = sum(counts.values())
        if total == 0:
            return None
        found = []
        for share in (0.5, 0.9, 0.99):
            rank, seen, bucket = math.ceil(share * total), 0, 0
            for bucket in sorted(counts):
                seen += counts[bucket]
                if seen >= rank:
                    break
            found.append(_SMALLEST_S * RATIO**bucket * 1e3)
        return QuantileSnapshot(p50=found[0], p90=found[1], p99=found[2])

    def _now(self) -> Counter[int]:
        """The slice of the present; those that are too old go."""
        current = int(self._clock() * SLICES / WINDOW_S)
        if current not in self._slices:
            self._slices = {at: counts for at, counts in self._slices.items() if at > current - SLICES}
            self._slices[current] = Counter()
        return self._slices[current]


class LatencyWindow:
    """Hears what a FrontendObserver hears of times, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.first_token = SlidingQuantiles(clock)
        self.between = SlidingQuantiles(clock)
        self.whole = SlidingQuantiles(clock)
        self.queue = SlidingQuantiles(clock)

    def snapshot(self) -> LatencySnapshot:
        """Returns the last minute."""
        return LatencySnapshot(
            requests=self.whole.count(),
            ttft_ms=self.first_token.quantiles(),
            inter_token_ms=self.between.quantiles(),
            end_to_end_ms=self.whole.quantiles(),
            queue_ms=self.queue.quantiles(),
        )
