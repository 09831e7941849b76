"""Quantiles of the last minute: right to within their step, and forgotten in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.telemetry.latency import RATIO, WINDOW_S, LatencyWindow, SlidingQuantiles


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_without_values_there_are_no_quantiles() -> None:
    told = LatencyWindow(Clock()).snapshot()
    assert (told.requests, told.ttft_ms, told.inter_token_ms, told.end_to_end_ms, told.queue_ms) == (0,) + (None,) * 4


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=60))
def test_quantiles_are_those_of_the_values(values: list[float]) -> None:
    window = SlidingQuantiles(Clock())
    for value in values:
        window.add(value)
    found = window.quantiles()
    assert found is not None and window.count() == len(values)
    ordered = sorted(values)
    for share, told in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        exact = ordered[-(-int(share * 100) * len(values) // 100) - 1] * 1e3
        assert told == pytest.approx(exact, rel=RATIO - 1)


def test_a_value_counts_as_often_as_it_was() -> None:
    window = SlidingQuantiles(Clock())
    window.add(0.010, 99)
    window.add(1.0)
    found = window.quantiles()
    assert found is not None and window.count() == 100
    assert (found.p50, found.p99) == (pytest.approx(10, rel=0.03), pytest.approx(10, rel=0.03))


def test_what_is_older_than_the_window_is_forgotten() -> None:
    clock = Clock()
    window = SlidingQuantiles(clock)
    window.add(5.0)
    clock.now += WINDOW_S - 10
    window.add(0.1)
    assert window.count() == 2
    clock.now += 15
    found = window.quantiles()
    assert window.count() == 1 and found is not None and found.p99 == pytest.approx(100, rel=0.03)
    clock.now += WINDOW_S
    assert window.quantiles() is None
