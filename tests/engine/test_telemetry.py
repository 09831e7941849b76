"""What the engine tells those who look: rows, maps, events, and why a request is where it is."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from control_plane import ControlPlane, submit
from hand_compiler import REGEX, HandCompiler
from hypothesis import given, settings
from hypothesis import strategies as st
from token_cache import MemoryStorage, group

from tokenspeed.messages import Finish, Inspect, Order
from tokenspeed.messages.snapshot import HELD, GroupSnapshot, RequestDetail, StateSnapshot
from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed_scheduler import transition_table

ARROWS = {(state, target) for state, _, successors in transition_table() for target in successors}
MIXES: tuple[tuple[GroupFacts, ...], ...] = (
    (group(),),
    (group("full", granularity=4), group("window", "sliding_window", 4, children=2, window=7)),
    (group("full", granularity=4), group("state", "state", 0, checkpoint=8)),
)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * position + 13 * salt) % 997 for position in range(length)]


def look(plane: ControlPlane) -> StateSnapshot:
    """The state now, complete."""
    plane.channel.send_in(watch_s=60)
    plane.loop.round()
    plane.loop.publish_snapshot()
    return plane.channel.snapshots[-1]


def detail(plane: ControlPlane, name: str) -> RequestDetail | None:
    """What the loop answers at the end of one more round."""
    plane.channel.send_in(inspects=[Inspect(7, name)])
    plane.loop.round()
    assert plane.channel.inspected[-1].number == 7
    return plane.channel.inspected[-1].detail


def known(plane: ControlPlane, name: str) -> RequestDetail:
    found = detail(plane, name)
    assert found is not None
    return found


def rounds(plane: ControlPlane, count: int) -> None:
    for _ in range(count):
        plane.loop.round()


def says(detail: RequestDetail, *parts: str) -> None:
    text = "\n".join([detail.reason, *detail.explain])
    for part in parts:
        assert part in text, text


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


# "running 0, waiting 6, KV 0 %" has a reason each time.


def test_a_paused_engine_says_so_of_everybody() -> None:
    plane = ControlPlane()
    plane.channel.send_in(orders=[Order(1, "pause")], submits=[submit(h, prompt_of(5, h)) for h in range(1, 7)])
    rounds(plane, 2)
    state = look(plane)
    assert (state.running, state.waiting, state.groups[0].held, state.paused) == (0, 6, 0, True)
    assert all("POST /continue_generation" in row.reason for row in state.requests)
    says(known(plane, "request-4"), "an operator has paused the engine")
    plane.channel.send_in(orders=[Order(2, "continue")])
    rounds(plane, 2)
    assert not look(plane).paused and "paused" not in known(plane, "request-4").explain[0]


def test_a_constraint_that_is_compiled_is_the_reason() -> None:
    compiler = HandCompiler()
    plane = ControlPlane(grammars=compiler)
    plane.channel.send_in(submits=[submit(h, prompt_of(5, h), constraint=REGEX) for h in range(1, 7)])
    rounds(plane, 2)
    state = look(plane)
    assert (state.running, state.waiting, state.held, state.groups[0].held) == (0, 6, 6, 0)
    assert [(row.state, row.handle) for row in state.requests] == [(HELD, handle) for handle in range(1, 7)]
    found = known(plane, "request-2")
    says(found, "its constraint is being compiled", "api.structured_output")
    assert (found.prompt_tokens, found.timeline[0].state) == (5, HELD)
    assert known(plane, "3").request_id == "request-3"


def test_a_storage_that_does_not_answer_is_the_reason_and_then_an_event() -> None:
    now = [50.0]
    plane = ControlPlane(host_parents=40, storage=MemoryStorage(), clock=lambda: now[0])
    plane.device.storage_answers = False
    plane.channel.send_in(submits=[submit(h, prompt_of(9, h)) for h in (1, 2)])
    rounds(plane, 2)
    state = look(plane)
    assert (state.running, state.waiting, state.states["Prefetching"]) == (0, 2, 2)
    assert state.storage is not None and state.storage.pending == 2
    says(known(plane, "request-1"), "waits for cache operation", "the storage is asked", "5000 ms")
    now[0] += 6
    rounds(plane, 2)
    state = look(plane)
    assert state.running == 2
    assert [(event.kind, event.request_id) for event in state.events] == [
        ("storage_timeout", "request-1"),
        ("storage_timeout", "request-2"),
    ]
    assert "within 5000 ms" in state.events[0].text


def test_a_request_larger_than_the_room_says_what_it_needs_and_who_has_it() -> None:
    plane = ControlPlane(num_blocks=20, chunk=64)
    plane.channel.send_in(submits=[submit(1, prompt_of(40, 1), 30)])
    rounds(plane, 2)
    plane.channel.send_in(submits=[submit(2, prompt_of(40, 2), 8)])
    rounds(plane, 2)
    state = look(plane)
    assert state.headroom is not None and state.headroom.largest < 48
    assert (state.running, state.waiting) == (1, 1)
    assert state.requests[0].reason.startswith("capacity: short by ")
    says(
        known(plane, "request-2"),
        "place 1 of 1 in the line",
        "its first chunk of 40 tokens needs 10 blocks, and beside it 2 blocks must be left for its output "
        "(scheduler.headroom 4096)",
        "are free and",
        "promised to those that run",
        "the end of request 1 would make room",
        "more blocks (kv.bytes)",
    )


def test_a_prompt_behind_another_says_which_and_why_that_one_waits() -> None:
    plane = ControlPlane(max_num_seqs=1)
    plane.channel.send_in(submits=[submit(h, prompt_of(5, h), 30) for h in (1, 2, 3)])
    rounds(plane, 2)
    says(known(plane, "request-3"), "behind request 2 in the line: no row: all 1 are taken (scheduler.max_seqs)")


def test_a_chunk_without_budget_names_the_budget() -> None:
    plane = ControlPlane(chunk=4, overlap=0)
    plane.channel.send_in(submits=[submit(h, prompt_of(3, h), 40) for h in range(1, 6)])
    rounds(plane, 8)
    plane.channel.send_in(submits=[submit(9, prompt_of(30, 9), 4)])
    rounds(plane, 1)
    waiting = [row for row in look(plane).requests if row.reason]
    assert any("4 tokens were spent (scheduler.chunk)" in row.reason for row in waiting)


def test_a_blocked_chunk_says_how_far_it_is_and_what_would_free_it() -> None:
    """A prompt that is cut waits for a block that one who decodes has."""
    plane = ControlPlane(num_blocks=16, chunk=8, overlap=0, prefix_cache=False)
    plane.channel.send_in(submits=[submit(1, prompt_of(8, 1), 40, declared=False)])
    rounds(plane, 14)
    plane.channel.send_in(submits=[submit(2, prompt_of(40, 2), 2)])
    found = None
    for _ in range(12):
        found = known(plane, "request-2")
        if found.state == "Prefilling" and found.reason.startswith("capacity"):
            break
    assert found is not None
    says(found, "capacity: short by ", "computed ", " of the 40 tokens", "the end of request 1 would make room")


def test_a_retracted_request_says_to_whom_it_gave_way_and_what_it_waits_for() -> None:
    plane = ControlPlane(num_blocks=14, max_num_seqs=6, host_parents=60)
    plane.channel.send_in(submits=[submit(h, prompt_of(9, h), 24, declared=False) for h in range(1, 7)], watch_s=600)
    told_in: dict[str, set[str]] = {"Retracted": set(), "Restoring": set()}
    for _ in range(200):
        for row in look(plane).requests:
            if row.state in told_in:
                assert row.host_blocks > 0
                told_in[row.state].update(plane.scheduler.describe(row.handle).lines)
    waiting, coming = ("\n".join(told_in[state]) for state in ("Retracted", "Restoring"))
    assert "its image of " in waiting and "(kv.host_bytes): nothing is computed again" in waiting
    assert "group full: its image needs " in waiting
    assert "is on the way from the host pool to the device; it runs when the copy has ended" in coming
    assert "waits for cache operation " in coming
    events = [event for state in plane.channel.snapshots for event in state.events]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    told = [event for event in events if event.kind == "retraction"]
    assert told
    assert all(event.request_id and "gave " in event.text and "to request" in event.text for event in told)


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
