"""Pauses and flushes in the real loop over the real scheduler."""

import pytest
from control_plane import ControlPlane, submit
from token_device import expected_tokens

from tokenspeed.engine.journaled_scheduler import event_of, event_record
from tokenspeed.messages import PROTOCOL_VERSION, Order, OrderDone
from tokenspeed_scheduler import ForgetCache

PROMPT = [(7 * position) % 997 for position in range(20)]


def ordered(plane: ControlPlane, order: Order) -> OrderDone:
    """Gives an order and makes the round that answers it."""
    plane.channel.send_in(orders=[order])
    plane.loop.round()
    return plane.channel.answers[-1]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_pause_in_place_changes_no_token(overlap: int) -> None:
    plane = ControlPlane(overlap=overlap)
    plane.channel.send_in(submits=[submit(1, PROMPT, 30)])
    for _ in range(6):
        plane.loop.round()
    assert ordered(plane, Order(1, "pause")) == OrderDone(version=PROTOCOL_VERSION, number=1)
    before = plane.channel.tokens(1)
    plane.channel.send_in(submits=[submit(2, PROMPT[:9], 5)])
    for _ in range(20):
        plane.loop.round()
    assert 0 < len(before) < 30 and plane.channel.tokens(1) == before and plane.channel.tokens(2) == []
    assert plane.channel.snapshots[-1].has_work, "the state is told in a pause too"
    ordered(plane, Order(2, "continue"))
    plane.until_quiet()
    assert plane.channel.tokens(1) == expected_tokens(PROMPT, 30)
    assert plane.channel.tokens(2) == expected_tokens(PROMPT[:9], 5)
    plane.assert_pool_is_whole()


def test_a_paused_loop_waits_for_input_and_for_nothing_else() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, PROMPT, 30)])
    plane.loop.round()
    ordered(plane, Order(1, "pause"))
    waited = plane.channel.waits
    for _ in range(10):
        plane.loop.round()
    assert plane.channel.waits >= waited + 9
    assert plane.loop._statistics.steps == 1, "what was planned before landed, and nothing since"


def test_aborts_in_a_pause_leave_the_pool_whole() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, PROMPT, 30), submit(2, PROMPT[:5], 30)])
    for _ in range(3):
        plane.loop.round()
    plane.channel.send_in(aborts=[1, 2], orders=[Order(1, "pause")])
    plane.loop.round()
    plane.loop.round()
    plane.assert_pool_is_whole()


def test_a_drain_ends_a_pause() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, PROMPT, 12)], orders=[Order(1, "pause")])
    plane.loop.round()
    plane.channel.send_in(drain=True)
    for _ in range(50):
        plane.loop.round()
    assert plane.channel.tokens(1) == expected_tokens(PROMPT, 12)


@pytest.mark.parametrize("host_parents", [0, 16])
def test_a_flush_forgets_every_prefix(host_parents: int) -> None:
    plane = ControlPlane(host_parents=host_parents)
    plane.channel.send_in(submits=[submit(1, PROMPT)])
    plane.until_quiet()
    snapshot = plane.scheduler.snapshot()
    assert snapshot.groups[0].cached > 0 and (not host_parents or snapshot.host[0].cached > 0)
    evicted = snapshot.evictions
    assert ordered(plane, Order(1, "flush_cache")).refused == ""
    snapshot = plane.scheduler.snapshot()
    assert [counts.cached for counts in (*snapshot.groups, *snapshot.host)] == [0] * (1 + bool(host_parents))
    assert snapshot.evictions == evicted, "a flush is no eviction"
    plane.scheduler.check_invariants()
    plane.channel.send_in(submits=[submit(2, PROMPT)])
    plane.until_quiet()
    assert [output.cached_tokens for output in plane.channel.outputs if output.handle == 2][0] == 0
    assert plane.channel.tokens(2) == expected_tokens(PROMPT, 8)


def test_a_flush_is_refused_while_requests_live() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, PROMPT, 30), submit(2, PROMPT[:5], 30)])
    plane.loop.round()
    assert "2 requests run or wait" in ordered(plane, Order(5, "flush_cache")).refused
    ordered(plane, Order(6, "pause"))
    assert "2 requests" in ordered(plane, Order(7, "flush_cache")).refused
    assert [answer.number for answer in plane.channel.answers] == [5, 6, 7]
    ordered(plane, Order(8, "continue"))
    plane.until_quiet()
    assert plane.channel.tokens(1) == expected_tokens(PROMPT, 30)


def test_a_flush_waits_for_the_last_step_of_a_request_that_has_ended() -> None:
    """With a step planned ahead, the client knows of the end before the device does."""
    plane = ControlPlane(overlap=1)
    plane.channel.send_in(submits=[submit(1, PROMPT, 4)])
    while not plane.channel.ends(1):
        plane.loop.round()
    plane.channel.send_in(orders=[Order(1, "flush_cache")])
    plane.until_quiet()
    assert plane.channel.answers == [OrderDone(version=PROTOCOL_VERSION, number=1)]
    assert plane.scheduler.snapshot().groups[0].cached == 0


def test_a_journal_holds_a_flush() -> None:
    assert isinstance(event_of(*event_record(ForgetCache())), ForgetCache)
