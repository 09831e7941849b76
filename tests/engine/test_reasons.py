"""Why nothing runs: each way to "running 0, waiting 6, KV 0 %" says so, in words that name the knob."""

from control_plane import ControlPlane, submit
from hand_compiler import REGEX, HandCompiler
from looks import known, look, prompt_of, rounds, says
from token_cache import MemoryStorage

from tokenspeed.messages import Order
from tokenspeed.messages.snapshot import HELD


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
    says(found, "what its answer has to keep to is being compiled", "api.structured_output")
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
