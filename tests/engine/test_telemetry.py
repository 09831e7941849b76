"""What the engine tells those who look: rows, maps, events, and why a request is where it is."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from control_plane import ControlPlane, submit
from hypothesis import given, settings
from hypothesis import strategies as st
from looks import detail, known, look, prompt_of, rounds
from token_cache import group

from tokenspeed.engine.loop import EngineFailure
from tokenspeed.messages import Finish
from tokenspeed.messages.snapshot import GroupSnapshot, RequestDetail
from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed_scheduler import transition_table

ARROWS = {(state, target) for state, _, successors in transition_table() for target in successors}
MIXES: tuple[tuple[GroupFacts, ...], ...] = (
    (group(),),
    (group("full", granularity=4), group("window", "sliding_window", 4, children=2, window=7)),
    (group("full", granularity=4), group("state", "state", 0, checkpoint=8)),
)


# Pictures.


def assert_drawn(groups: Sequence[GroupSnapshot]) -> None:
    for one in groups:
        assert one.held + one.cached + one.free + one.elsewhere == one.total == len(one.map)
        assert one.map.count("p") == one.pinned
        assert one.map.count("h") + one.map.count("p") == one.held
        assert (one.map.count("c"), one.map.count("."), one.map.count("-")) == (one.cached, one.free, one.elsewhere)


def assert_a_way(detail: RequestDetail) -> None:
    states = [entry.state for entry in detail.timeline]
    assert states[0] == "Submitted" and set(itertools.pairwise(states)) <= ARROWS
    for before, after in zip(detail.timeline, detail.timeline[1:], strict=False):
        assert before.round <= after.round and before.time <= after.time
    assert detail.arrived == detail.timeline[0].time <= detail.time


@settings(max_examples=25, deadline=None)
@given(
    groups=st.sampled_from(MIXES),
    blocks=st.integers(14, 24),
    host=st.sampled_from([0, 40]),
    overlap=st.integers(0, 1),
    asked=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=8
    ),
)
def test_every_map_is_its_counts_and_every_timeline_a_way_through_the_table(
    groups: tuple[GroupFacts, ...], blocks: int, host: int, overlap: int, asked: list[tuple[int, int, int, int]]
) -> None:
    plane = ControlPlane(groups=groups, num_blocks=blocks, host_parents=host, overlap=overlap, max_num_seqs=4)
    bound = plane.scheduler.max_single_request_tokens()
    for handle, (length, new, gap, salt) in enumerate(asked, 1):
        length = min(length, bound - 1)
        request = submit(handle, prompt_of(length, salt), min(new, bound - length), declared=salt > 1)
        plane.channel.send_in(submits=[request])
        for _ in range(gap):
            state = look(plane)
            assert_drawn(state.groups)
            assert_drawn(state.host or [])
            for row in state.requests:
                found = known(plane, row.request_id)
                assert_a_way(found)
                assert found.explain
    plane.until_quiet()
    for handle in range(1, len(asked) + 1):
        found = known(plane, f"request-{handle}")
        assert_a_way(found)
        assert found.timeline[-1].state == "Finished"
        assert (found.finish_reason, found.error) == ("length", "") and found.ended is not None


# Who looks gets all, who only counts gets counts.


def test_rows_and_maps_are_made_while_somebody_looks() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, prompt_of(9), 20)])
    rounds(plane, 3)
    plane.loop.publish_snapshot()
    quiet = plane.channel.snapshots[-1]
    assert (quiet.complete, quiet.requests, quiet.requests_omitted, quiet.running) == (False, [], 1, 1)
    assert quiet.groups[0].map == "" and quiet.headroom is not None
    state = look(plane)
    assert state.complete and state.groups[0].map.count("h") == state.groups[0].held > 0
    (row,) = state.requests
    assert (row.handle, row.request_id, row.output_limit, row.deadline) == (1, "request-1", 20, None)
    assert row.age_s >= 0 and row.arrived <= state.time


def test_ages_count_from_when_a_request_came_and_not_from_before_the_wait() -> None:
    now = [1000.0]
    plane = ControlPlane(max_num_seqs=1, wall_clock=lambda: now[0])
    plane.channel.send_in(submits=[submit(1, prompt_of(9), 100)])
    rounds(plane, 3)
    now[0] = 2000.0
    plane.channel.send_in(submits=[submit(2, prompt_of(9), 20)])
    rounds(plane, 1)
    now[0] = 2007.0
    waiting, running = look(plane).requests
    assert (waiting.arrived, waiting.age_s) == (2000.0, 7.0)
    assert (running.arrived, running.age_s) == (1000.0, 1007.0)
    assert known(plane, "request-2").timeline[0].time == 2000.0


def test_a_look_has_its_snapshot_at_once_and_not_more_than_four_a_second() -> None:
    now = [100.0]
    plane = ControlPlane(telemetry_clock=lambda: now[0])
    plane.channel.send_in(submits=[submit(1, prompt_of(9), 100)])  # an idle loop tells before it waits
    rounds(plane, 2)
    taken = len(plane.channel.snapshots)
    now[0] += 0.01
    plane.channel.send_in(watch_s=5)
    plane.loop.round()
    assert [state.complete for state in plane.channel.snapshots[taken:]] == [True]
    for _ in range(20):
        now[0] += 0.01
        plane.channel.send_in(watch_s=5)
        plane.loop.round()
    assert len(plane.channel.snapshots) == taken + 1
    now[0] += 0.25
    plane.loop.round()
    assert [state.complete for state in plane.channel.snapshots[taken:]] == [True, True]
    now[0] += 6
    plane.loop.round()
    assert not plane.channel.snapshots[-1].complete, "nobody looks any more"


def test_two_hundred_rows_and_who_waits_is_first() -> None:
    plane = ControlPlane(max_num_seqs=2)
    plane.channel.send_in(submits=[submit(handle, prompt_of(3, handle), 30) for handle in range(1, 260)])
    rounds(plane, 3)
    state = look(plane)
    assert [row.handle for row in state.requests] == list(range(3, 203))
    assert state.requests_omitted == 59


# What happened.


def events_of(plane: ControlPlane) -> list[tuple[str, str, str]]:
    plane.loop.publish_snapshot()
    return [(event.kind, event.request_id, event.text) for state in plane.channel.snapshots for event in state.events]


def test_what_goes_wrong_is_told_once_with_its_request() -> None:
    plane = ControlPlane(overlap=0)
    plane.device.nan = lambda forward_id, handle: handle == 2
    plane.channel.send_in(submits=[submit(1, prompt_of(5)), submit(2, prompt_of(6)), submit(3, prompt_of(7), 50)])
    rounds(plane, 2)
    plane.channel.send_in(aborts=[3])
    plane.until_quiet()
    kinds = events_of(plane)
    assert kinds[0] == ("nan", "request-2", "the model's logits were not numbers")
    assert kinds[1][:2] == ("abort", "request-3") and "client left" in kinds[1][2]
    assert len(kinds) == 2
    assert known(plane, "request-2").error == "the model's logits were not numbers"
    assert known(plane, "request-3").finish_reason == "abort"


def test_a_failed_step_is_an_event_and_so_are_its_requests() -> None:
    plane = ControlPlane(overlap=0)
    plane.device.fail = lambda forward_id: forward_id == 2
    plane.channel.send_in(submits=[submit(1, prompt_of(5))])
    plane.until_quiet()
    assert [event[:2] for event in events_of(plane)] == [("failed_step", ""), ("abort", "request-1")]
    assert "planted" in events_of(plane)[0][2]


def test_what_failed_is_told_before_the_engine_ends() -> None:
    plane = ControlPlane(overlap=0)
    plane.device.fail = lambda forward_id: True
    for handle in (1, 2):
        plane.channel.send_in(submits=[submit(handle, prompt_of(5))])
        rounds(plane, 1)
    plane.channel.send_in(submits=[submit(3, prompt_of(5))])
    with pytest.raises(EngineFailure):
        rounds(plane, 1)
    events = [event.kind for state in plane.channel.snapshots for event in state.events]
    assert events.count("failed_step") == 3


def test_prefixes_that_give_way_at_once_are_a_burst_told_once() -> None:
    plane = ControlPlane(num_blocks=40, max_model_len=160, chunk=160)
    for salt in range(4):
        plane.channel.send_in(submits=[submit(salt + 1, prompt_of(40, salt), 2)])
        plane.until_quiet()
    plane.loop.publish_snapshot()
    plane.channel.snapshots.clear()
    plane.channel.send_in(submits=[submit(50, prompt_of(150, 77), 2)])
    plane.until_quiet()
    bursts = [event for event in events_of(plane) if event[0] == "eviction_burst"]
    assert len(bursts) == 1 and "(kv.bytes)" in bursts[0][2]


# Who asks.


@pytest.mark.parametrize("name", ["request-99", "99", "", "no such/thing"])
def test_an_unknown_name_has_no_answer(name: str) -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, prompt_of(5))])
    assert detail(plane, name) is None


def test_ids_handles_choices_and_ends() -> None:
    plane = ControlPlane(max_model_len=60)
    choices = [submit(handle, prompt_of(5), 30) for handle in (4, 5)]
    named = [type(one)(**{**_fields(one), "request_id": f"call/{at}"}) for at, one in enumerate(choices)]
    plane.channel.send_in(submits=[*named, submit(6, prompt_of(200))])
    rounds(plane, 3)
    assert known(plane, "call").handle == known(plane, "call/0").handle == known(plane, "4").handle == 4
    assert known(plane, "call/1").handle == 5
    refused = known(plane, "request-6")
    assert refused.finish_reason == "error" and "max_model_len" in refused.error
    plane.channel.send_in(finishes=[Finish(4, 2)])
    plane.until_quiet()
    ended = known(plane, "4")
    assert (ended.state, ended.finish_reason, ended.explain) == (
        "Finished",
        "stop",
        ["it ended: its text was complete"],
    )
    assert ended.ended is not None and ended.ended >= ended.arrived


def _fields(one: object) -> dict[str, object]:
    return {name: getattr(one, name) for name in type(one).__struct_fields__}  # type: ignore[attr-defined]


def test_the_last_sixty_four_that_ended_are_remembered() -> None:
    plane = ControlPlane()
    for handle in range(1, 71):
        plane.channel.send_in(submits=[submit(handle, prompt_of(3, handle), 1)])
        plane.until_quiet()
    found: Callable[[int], bool] = lambda handle: detail(plane, f"request-{handle}") is not None  # noqa: E731
    assert [handle for handle in range(1, 71) if found(handle)] == list(range(7, 71))
