"""The recent past: exact at every zoom, blank where nothing is known, and of bounded size."""

import pytest

from tokenspeed_tui.history import LONGEST_S, RESOLUTION_S, History, kv_use
from tokenspeed_tui.render import text as t
from tokenspeed_tui.view import CounterView, GroupView, LatencyView, QuantileView, SnapshotView


def snapshot(decode: int | None = None, **fields) -> SnapshotView:
    counters = CounterView(decode_tokens=decode, prefix_query_tokens=decode, prefix_hit_tokens=fields.pop("hit", None))
    return SnapshotView(counters=counters, **fields)


def told(*totals: tuple[float, int | None], **fields) -> History:
    history = History()
    for time, total in totals:
        history = history.with_snapshot(snapshot(total, **fields), time)
    return history


def test_a_rate_is_the_growth_over_the_span_of_each_bar():
    history = told((0.0, 0), (1.0, 10), (2.0, 30), (3.0, 30), (4.0, 100))
    assert history.rate("decode_tokens", 4.0, 4) == pytest.approx((10.0, 20.0, 0.0, 70.0))
    assert history.rate("decode_tokens", 4.0, 2) == pytest.approx((15.0, 35.0))


def test_the_bars_of_any_window_add_up_to_what_was_generated():
    history = told(*((0.7 * step, step * step) for step in range(80)))
    for window, cells in ((30.0, 60), (30.0, 7), (50.0, 13)):
        rates = history.rate("decode_tokens", window, cells)
        end = history.times[-1]
        span = window / cells
        widths = [span] * (cells - 1) + [end - (-(-end // span) - 1) * span]
        made = sum(rate * width for rate, width in zip(rates, widths, strict=True) if rate is not None)
        start = history._total("decode_tokens", -(-end // span) * span - window)
        assert made == pytest.approx(79 * 79 - start)


def test_before_the_first_snapshot_bars_are_blank():
    history = told((100.0, 0), (101.0, 5), (102.0, 5))
    assert history.rate("decode_tokens", 4.0, 4) == (None, None, 5.0, 0.0)
    assert History().rate("decode_tokens", 60.0, 10) == ()
    assert told((100.0, None), (101.0, None)).rate("decode_tokens", 2.0, 2) == (None, None)


def test_a_bar_keeps_its_height_while_time_goes_on():
    history = told(*((step / 4, step * step) for step in range(81)))
    early = history.rate("decode_tokens", 10.0, 10)
    later = told(*((step / 4, step * step) for step in range(85))).rate("decode_tokens", 10.0, 10)
    assert later[:-2] == early[1:-1], "the last bar is not complete before the next begins"


def test_a_gauge_holds_for_a_while_and_then_is_unknown():
    history = told((10.0, 0), running=3).with_snapshot(snapshot(0, running=5), 18.0)
    assert history.gauge("running", 8.0, 8) == (3, 3, 3, 3, None, None, None, 5)


def test_shares_are_of_what_was_asked_for_in_the_span():
    history = History()
    for time, total, hit in ((0.0, 0, 0), (1.0, 100, 50), (2.0, 100, 50), (3.0, 200, 150)):
        history = history.with_snapshot(snapshot(total, hit=hit), time)
    assert history.share("hit_tokens", "queried_tokens", 3.0, 3) == (0.5, None, 1.0)


def test_a_days_worth_of_snapshots_takes_no_more_room_than_a_quarter_of_an_hour():
    history = History()
    for step in range(12_000):
        history = history.with_snapshot(snapshot(step), step / 10)
    most = LONGEST_S / RESOLUTION_S + 2
    assert len(history.times) == len(history.points) <= most
    assert history.times[-1] - history.times[0] <= LONGEST_S
    assert history.rate("decode_tokens", 10.0, 2) == pytest.approx((10.0, 10.0))


def test_latencies_and_use_are_kept():
    latency = LatencyView(ttft_ms=QuantileView(p50=120.0, p99=400.0))
    groups = (GroupView(held=1, total=4), GroupView(held=3, total=4), GroupView(held=None, total=4))
    history = told((1.0, 0), latency=latency, groups=groups)
    assert history.gauge("ttft_p50", 1.0, 1) == (120.0,)
    assert history.gauge("inter_token_p50", 1.0, 1) == (None,)
    assert history.gauge("kv_use", 1.0, 1) == (0.75,)
    assert kv_use(SnapshotView()) is None


def test_axes_end_at_round_figures():
    assert [t.scale((value,)) for value in (0.0, 0.03, 1.0, 1.1, 4.0, 60.0, 300.0, 501.0)] == pytest.approx(
        [1.0, 0.05, 1.0, 2.0, 5.0, 100.0, 500.0, 1000.0]
    )
    assert t.scale((None, None)) == 1.0


def test_bars_tell_zero_little_and_unknown_apart():
    assert t.sparkline((None, 0.0, 0.001, 0.5, 1.0, 9.0), 1.0) == " ·▁▅██"
