"""The dashboard's demo: the scheduler's own figures, the same ones for the same seed, and all that there is to see."""

from typing import Any

import msgspec
import pytest

from tokenspeed.launch.demo import Demo, demo_world
from tokenspeed.launch.demo.engine import STORAGE_BLOCKS
from tokenspeed.messages.snapshot import RequestDetail, StateSnapshot
from tokenspeed.server.configuration import ConfigurationBody
from tokenspeed.server.state import StateBody
from tokenspeed_scheduler import Scheduler

EPOCH = 1_750_000_000.0


def snapshot_of(demo: Demo) -> StateSnapshot:
    return msgspec.convert(demo.state()["snapshot"], StateSnapshot)


def test_one_seed_is_one_run_and_another_is_another() -> None:
    runs = []
    for seed, pace in ((5, 0.25), (5, 2.0), (6, 2.0)):
        demo = Demo(seed, EPOCH)
        for _ in range(round(12 / pace)):
            demo.advance(pace)
        runs.append(snapshot_of(demo).counters)
    assert runs[0] == runs[1], "how often somebody looks changes nothing"
    assert runs[1] != runs[2]


@pytest.mark.parametrize("seed", range(2))
def test_within_a_minute_there_is_all_to_see(seed: int) -> None:
    scheduler = Scheduler(demo_world())
    demo = Demo(seed, EPOCH, scheduler)
    seen: dict[str, int] = {}
    reasons = ""
    for _ in range(30):
        demo.advance(2.0)
        snapshot = snapshot_of(demo)
        assert abs(snapshot.time - demo.state()["server_time"]) < 0.01
        for name, count in snapshot.states.items():
            seen[name] = max(seen.get(name, 0), count or 0)
        reasons += "".join(row.reason for row in snapshot.requests)
        for group in snapshot.groups:
            assert group.held + group.cached + group.free + group.elsewhere == group.total
            assert len(group.map) == 256
    scheduler.check_invariants()
    for name in ("Submitted", "Prefilling", "Decoding", "Retracted", "Finished"):
        assert seen[name] > 0, name
    assert {("Retracted", "Restoring"), ("Restoring", "Decoding")} <= {
        (flow.source, flow.target) for flow in snapshot.flows
    }
    counters = snapshot.counters
    had = ("retractions", "restores", "finished", "aborted", "prefix_hit_tokens", "storage_hit_tokens", "evictions")
    for name in had:
        assert getattr(counters, name) > 0, name
    assert counters.failed_steps == counters.nan_rows == counters.ignored_results == 0
    assert 58 < snapshot.uptime_s < 62
    assert "short by" in reasons
    kinds = {event.kind for event in snapshot.events}
    assert {"retraction", "eviction_burst"} <= kinds
    assert [event.sequence for event in snapshot.events] == sorted({event.sequence for event in snapshot.events})
    assert snapshot.storage is not None
    assert 0 < snapshot.storage.blocks <= STORAGE_BLOCKS
    assert snapshot.latency is not None
    assert snapshot.latency.ttft_ms is not None
    assert snapshot.latency.ttft_ms.p50 <= snapshot.latency.ttft_ms.p99 < 1e3 * 60


def test_one_request_is_told_by_name_or_handle_and_another_is_not() -> None:
    demo = Demo(0, EPOCH)
    demo.advance(12.0)
    row = next(row for row in snapshot_of(demo).requests if row.state == "Decoding")
    detail = msgspec.convert(demo.detail(row.request_id), RequestDetail)
    assert (detail.handle, detail.request_id) == (row.handle, row.request_id)
    assert [entry.state for entry in detail.timeline][-2:] == ["PrefillDone", "Decoding"]
    assert detail.explain
    assert msgspec.convert(demo.detail(str(row.handle)), RequestDetail).request_id == row.request_id
    assert demo.detail("nobody") is None


def test_it_says_what_a_server_would_say() -> None:
    demo = Demo(0, EPOCH)
    demo.advance(1.0)
    assert msgspec.convert(demo.state(), StateBody).model == "demo"
    assert set(demo.state()) == {field.name for field in msgspec.structs.fields(StateBody)}
    told = msgspec.convert(demo.configuration(), ConfigurationBody)
    assert set(demo.configuration()) == {field.name for field in msgspec.structs.fields(ConfigurationBody)}
    values: dict[str, Any] = {key.key: key.value for key in told.keys}
    assert values["scheduler.chunk"] == demo_world().max_scheduled_tokens
    assert values["scheduler.max_seqs"] == demo_world().max_num_seqs
