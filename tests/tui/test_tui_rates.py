"""Rates come from two snapshots, head-room from one; what cannot be known is None."""

import msgspec
import pytest

from tokenspeed.telemetry.snapshot import CounterSnapshot, FlowSnapshot, GroupSnapshot
from tokenspeed_tui.picture import WINDOW_S, Picture, advance
from tokenspeed_tui.rates import Rates, compute_rates, flow_totals, headroom, total_hit_rate
from tokenspeed_tui.view import CounterView, SnapshotView, read_server


def view(story, snapshot) -> SnapshotView:
    read = read_server(story.state(snapshot)).snapshot
    assert read is not None
    return read


def test_rates_are_deltas_over_the_time_between_snapshots(story):
    rates = compute_rates(view(story, story.snapshot(0.0)), view(story, story.snapshot(4.0)))
    assert rates.span_s == 4.0
    assert rates.prefill_tokens == pytest.approx(300.0)
    assert rates.decode_tokens == pytest.approx(60.0)
    assert rates.steps == pytest.approx(25.0)
    assert rates.finished == pytest.approx(1.0)
    assert rates.aborted == 0.0
    assert rates.hit_rate == pytest.approx(0.4)
    assert rates.flows["Submitted", "Prefilling"] == pytest.approx(2.0)
    assert rates.flows["Prefilling", "Retracted"] == 0.0


def test_no_time_between_snapshots_gives_no_rates(story):
    snapshot = view(story, story.snapshot(1.0))
    assert compute_rates(snapshot, snapshot) == Rates()


def test_a_counter_that_is_missing_is_unknown_and_the_others_are_not(story):
    old, new = view(story, story.snapshot(0.0)), view(story, story.snapshot(1.0))
    counters = msgspec.structs.replace(new.counters, decode_tokens=None)
    rates = compute_rates(old, msgspec.structs.replace(new, counters=counters))
    assert rates.decode_tokens is None
    assert rates.prefill_tokens == pytest.approx(300.0)


def test_a_restarted_engine_gives_no_rates(story):
    old = view(story, story.snapshot(5.0))
    new = view(story, story.snapshot(6.0, uptime_s=0.5, counters=CounterSnapshot()))
    assert compute_rates(old, new) == Rates()


def test_nothing_asked_of_the_prefix_cache_is_no_hit_rate(story):
    same = story.snapshot(0.0).counters
    old, new = view(story, story.snapshot(0.0)), view(story, story.snapshot(1.0, counters=same))
    assert compute_rates(old, new).hit_rate is None
    assert compute_rates(old, new).decode_tokens == 0.0
    assert total_hit_rate(CounterView()) is None
    assert total_hit_rate(CounterView(prefix_query_tokens=8, prefix_hit_tokens=2)) == 0.25


def test_an_arrow_that_was_not_listed_before_counts_from_zero(story):
    flows = [FlowSnapshot("Decoding", "Retracted", 6)]
    rates = compute_rates(view(story, story.snapshot(0.0)), view(story, story.snapshot(2.0, flows=flows)))
    assert rates.flows == {("Decoding", "Retracted"): 3.0}


def test_the_window_keeps_rates_calm_but_recent(story):
    picture = Picture(url=story.url)
    for tenths in range(60):
        picture = advance(picture, story.observation(tenths / 10))
    assert picture.rates.span_s == pytest.approx(WINDOW_S)
    assert len(picture.history.points) == 12


def test_a_slow_poll_still_has_two_samples(story):
    picture = advance(advance(Picture(url=story.url), story.observation(0.0)), story.observation(30.0))
    assert picture.rates.span_s == 30.0
    assert picture.rates.decode_tokens == pytest.approx(60.0)


def test_the_same_snapshot_again_changes_no_rate(story):
    picture = advance(advance(Picture(url=story.url), story.observation(0.0)), story.observation(1.0))
    again = advance(picture, msgspec.structs.replace(story.observation(1.0), time=story.epoch + 1.6))
    assert again.rates == picture.rates
    assert again.history == picture.history
    assert again.samples == picture.samples


def test_a_restart_clears_what_was_before_it(story):
    picture = advance(advance(Picture(url=story.url), story.observation(0.0)), story.observation(1.0))
    assert picture.rates.decode_tokens is not None
    fresh = story.snapshot(2.0, uptime_s=0.1, counters=CounterSnapshot(), requests=[])
    restarted = advance(picture, story.observation(2.0, state=story.state(fresh)))
    assert restarted.rates == Rates()
    assert len(restarted.history.points) == 1
    assert restarted.timelines == {}


def test_timelines_follow_a_request_through_its_states(story):
    waiting = story.snapshot(0.0).requests[0]
    running = msgspec.structs.replace(waiting, state="Prefilling", reason="")
    picture = advance(
        Picture(url=story.url), story.observation(0.0, state=story.state(story.snapshot(0.0, requests=[waiting])))
    )
    for moment in (1.0, 2.0):
        snapshot = story.snapshot(moment, requests=[running])
        picture = advance(picture, story.observation(moment, state=story.state(snapshot)))
    stays = picture.timelines[waiting.handle]
    assert [(stay.state, stay.since - story.epoch) for stay in stays] == [("Submitted", 0.0), ("Prefilling", 1.0)]
    gone = advance(picture, story.observation(3.0, state=story.state(story.snapshot(3.0, requests=[]))))
    assert gone.timelines == {}


def group(**changes) -> GroupSnapshot:
    values = {
        "group_id": "full", "kind": "full_history", "block_granularity": 64, "bytes_per_block": 1024,
        "total": 100, "held": 60, "cached": 30, "free": 10, "pinned": 0,
    }  # fmt: skip
    return GroupSnapshot(**(values | changes))


def test_headroom_counts_free_and_evictable_blocks(story):
    request = msgspec.structs.replace(story.snapshot().requests[0], prompt_tokens=100, generated_tokens=50, blocks=3)
    room = headroom(view(story, story.snapshot(groups=[group()], requests=[request])))
    assert (room.tokens, room.typical_tokens, room.requests) == (40 * 64, 150, 40 // 3)


def test_headroom_leaves_pinned_blocks_out(story):
    room = headroom(view(story, story.snapshot(groups=[group(pinned=35)], requests=[])))
    assert (room.tokens, room.typical_tokens, room.requests) == (10 * 64, None, None)


def test_headroom_is_that_of_the_tightest_full_history_group(story):
    groups = [
        group(),
        group(group_id="other", free=1, held=99, cached=0),
        group(group_id="window", kind="sliding_window", free=0),
    ]
    room = headroom(view(story, story.snapshot(groups=groups, requests=[])))
    assert room.tokens == 64


def test_the_largest_request_is_bounded_by_the_model_too(story):
    snapshot = view(story, story.snapshot(groups=[group()], requests=[]))
    assert headroom(snapshot).largest is None
    assert headroom(snapshot, 512).largest == 512
    assert headroom(snapshot, 10**6).largest == 40 * 64


def test_headroom_is_unknown_without_the_figures(story):
    snapshot = view(story, story.snapshot())
    assert headroom(msgspec.structs.replace(snapshot, groups=())).tokens is None
    lame = msgspec.structs.replace(snapshot.groups[0], cached=None)
    assert headroom(msgspec.structs.replace(snapshot, groups=(lame,))).tokens is None


def test_data_is_stale_after_three_polls_and_never_before_three_seconds(story):
    picture = advance(Picture(url=story.url), story.observation(0.0))
    taken = picture.seen - 0.1
    assert picture.data_age(taken + 3.0) == pytest.approx(3.0)
    for interval, fresh, stale in ((0.5, 2.9, 3.1), (5.0, 14.9, 15.1)):
        assert not picture.is_stale(taken + fresh, interval)
        assert picture.is_stale(taken + stale, interval)
    assert Picture(url=story.url).data_age(taken) is None


def test_polls_are_counted_with_and_without_an_answer(story):
    picture = advance(Picture(url=story.url), story.observation(0.0, state=None, error="away"))
    assert (picture.polls, picture.error) == (1, "away")
    picture = advance(picture, story.observation(1.0))
    assert (picture.polls, picture.error) == (2, "")


def test_parts_that_are_missing_leave_their_row_out_and_nothing_else(story):
    state = story.state(story.snapshot())
    del state["snapshot"]["requests"][0]["state"]
    del state["snapshot"]["requests"][1]["handle"]
    state["snapshot"]["flows"][0] = ["Submitted", "Prefilling", None]
    del state["snapshot"]["counters"]["prefix_hit_tokens"]
    picture = advance(Picture(url=story.url), story.observation(state=state))
    assert sorted(picture.timelines) == [1, 2, 3, 4, 5, 6]
    assert ("Submitted", "Prefilling") not in flow_totals(picture.snapshot)
    assert len(flow_totals(picture.snapshot)) == 6
    assert total_hit_rate(picture.snapshot.counters) is None


def test_a_detail_stays_while_the_server_is_away(story):
    picture = advance(Picture(url=story.url), story.observation(0.0, detail={"handle": 8, "request_id": "req-8"}))
    assert picture.detail is not None and picture.detail.request_id == "req-8"
    away = advance(picture, story.observation(1.0, state=None, error="no server answers"))
    assert away.detail == picture.detail
    gone = advance(away, story.observation(2.0, detail_error="the server knows nothing more of it"))
    assert (gone.detail, gone.detail_error) == (None, "the server knows nothing more of it")


def test_looking_for_long_takes_no_more_memory(story):
    """After the longest window is full, a picture stays as large as it is; requests come and go meanwhile."""
    picture, sizes = Picture(url=story.url), {}
    first = story.snapshot().requests[0]
    for step in range(2_700):
        request = msgspec.structs.replace(first, handle=step, request_id=f"request-{step:08d}")
        event = {"sequence": step, "time": story.epoch + step, "kind": "abort", "request_id": "", "text": "x" * 40}
        state = story.state(None) | {"snapshot": bare(story, step, request, event)}
        picture = advance(picture, story.observation(float(step), state=state))
        if step in (1_799, 2_699):
            sizes[step] = len(msgspec.json.encode(picture.history)) + len(msgspec.json.encode(picture.events))
            assert len(picture.timelines) == 1 and len(picture.samples) <= 4
    assert abs(sizes[2_699] - sizes[1_799]) < 0.01 * sizes[1_799]


def bare(story, step: int, request, event: dict) -> dict:
    """A small snapshot: what grows with time is not in its groups and flows."""
    return {
        "time": story.epoch + step,
        "uptime_s": 1e6 + step,
        "counters": {"decode_tokens": 10_000_000 + step},
        "requests": [msgspec.to_builtins(request)],
        "events": [event],
        "running": 1,
    }
