"""The recent past: what sparklines are drawn from, in memory that does not grow."""

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Literal

import msgspec

from tokenspeed_tui.view import QuantileView, SnapshotView

RESOLUTION_S = 0.5
"""Snapshots of one half second leave one point: the last."""
LONGEST_S = 900.0
"""The past that is kept."""
GAUGE_AGE_S = 3.0
"""How long a gauge holds without a newer snapshot: an idle engine sends one a second."""

Counter = Literal["prefill_tokens", "decode_tokens", "queried_tokens", "hit_tokens"]
Gauge = Literal["running", "waiting", "kv_use", "ttft_p50", "ttft_p99", "inter_token_p50", "inter_token_p99"]
Course = tuple[float | None, ...]
"""Values of equal spans of time, the oldest first; None where nothing is known."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What one snapshot leaves: totals since the engine's start, and gauges. ``kv_use`` is a share of 1."""

    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    inter_token_p50: float | None = None
    inter_token_p99: float | None = None


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Points with their times, the oldest first."""

    times: tuple[float, ...] = ()
    points: tuple[Point, ...] = ()

    def with_snapshot(self, snapshot: SnapshotView, time: float) -> "History":
        """The history with one more point; it forgets what is older than LONGEST_S."""
        times, points = self.times, self.points
        if times and times[-1] // RESOLUTION_S == time // RESOLUTION_S:
            times, points = times[:-1], points[:-1]
        first = bisect_left(times, time - LONGEST_S)
        return History(times=(*times[first:], time), points=(*points[first:], _point(snapshot)))

    def rate(self, counter: Counter, window: float, cells: int) -> Course:
        """A total's growth per second, over each of ``cells`` spans that make up the last ``window`` seconds."""
        edges = self._edges(window, cells)
        totals = [self._total(counter, edge) for edge in edges]
        spans = zip(edges, edges[1:], totals, totals[1:], strict=False)
        return tuple(
            (after - before) / (end - start) if before is not None and after is not None and end > start else None
            for start, end, before, after in spans
        )

    def share(self, part: Counter, whole: Counter, window: float, cells: int) -> Course:
        """The growth of one total as a share of another's; None where that did not grow."""
        pairs = zip(self.rate(part, window, cells), self.rate(whole, window, cells), strict=True)
        return tuple(some / all_of if some is not None and all_of else None for some, all_of in pairs)

    def gauge(self, gauge: Gauge, window: float, cells: int) -> Course:
        """The last value in each span, or the one before it while that is no older than GAUGE_AGE_S."""
        edges = self._edges(window, cells)
        return tuple(self._value(gauge, start, end) for start, end in pairwise(edges))

    def _edges(self, window: float, cells: int) -> list[float]:
        """The ends of the spans. They lie on a fixed grid, so that a bar keeps its height while it moves on."""
        if cells <= 0 or not self.times:
            return []
        span = window / cells
        last = -(-self.times[-1] // span) * span
        return [min(last - span * (cells - number), self.times[-1]) for number in range(cells + 1)]

    def _total(self, counter: Counter, time: float) -> float | None:
        """A total at a time between two snapshots, on the straight line between them; None before the first."""
        after = bisect_left(self.times, time)
        if after >= len(self.times):
            return None
        upper: int | None = getattr(self.points[after], counter)
        if self.times[after] == time or upper is None:
            return upper
        if after == 0:
            return None
        lower: int | None = getattr(self.points[after - 1], counter)
        if lower is None:
            return None
        part = (time - self.times[after - 1]) / (self.times[after] - self.times[after - 1])
        return lower + part * (upper - lower)

    def _value(self, gauge: Gauge, start: float, end: float) -> float | None:
        index = bisect_right(self.times, end) - 1
        if index < 0 or self.times[index] < start - GAUGE_AGE_S:
            return None
        value: float | None = getattr(self.points[index], gauge)
        return value


def kv_use(snapshot: SnapshotView) -> float | None:
    """The share of the fullest group that requests hold, in [0, 1]; cached blocks are there for the taking."""
    uses = [
        group.held / group.total
        for group in snapshot.groups
        if group.held is not None and group.total and group.total > 0
    ]
    return max(uses, default=None)


def _point(snapshot: SnapshotView) -> Point:
    counters, latency = snapshot.counters, snapshot.latency
    ttft = latency.ttft_ms if latency is not None else None
    inter = latency.inter_token_ms if latency is not None else None
    return Point(
        prefill_tokens=counters.prefill_tokens,
        decode_tokens=counters.decode_tokens,
        queried_tokens=counters.prefix_query_tokens,
        hit_tokens=counters.prefix_hit_tokens,
        running=snapshot.running,
        waiting=snapshot.waiting,
        kv_use=kv_use(snapshot),
        ttft_p50=_quantile(ttft).p50,
        ttft_p99=_quantile(ttft).p99,
        inter_token_p50=_quantile(inter).p50,
        inter_token_p99=_quantile(inter).p99,
    )


def _quantile(measure: QuantileView | None) -> QuantileView:
    return measure or QuantileView()
