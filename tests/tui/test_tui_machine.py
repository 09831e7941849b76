"""The state machine as it is drawn: every arrow of the scheduler's own table, and no other."""

from itertools import pairwise

import pytest

from tokenspeed.telemetry.snapshot import STATES
from tokenspeed_scheduler import transition_table
from tokenspeed_tui.machine import PEER_STATES, SUCCESSORS, arrows
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render.canvas import Canvas
from tokenspeed_tui.render.machine import render_machine
from tokenspeed_tui.render.plan import LEAST_WIDTH, plan_machine

FUSED = frozenset(STATES) - frozenset(PEER_STATES)
ROLES = {
    "fused": FUSED,
    "prefill": frozenset(STATES) - {"RemotePrefilling"},
    "decode": frozenset(STATES) - {"PrefillAwaitingResult"},
}


def test_the_arrows_are_those_of_the_schedulers_table():
    table = {(state, target) for state, _, successors in transition_table() for target in successors}
    assert set(arrows(frozenset(STATES))) == {arrow for arrow in table if arrow[0] != arrow[1]}
    assert tuple(SUCCESSORS) == STATES


@pytest.mark.parametrize("width", [LEAST_WIDTH, 116, 140, 236])
@pytest.mark.parametrize("role", ROLES)
def test_every_arrow_runs_from_box_to_box(role, width):
    plan = plan_machine(ROLES[role], width)
    assert set(plan.boxes) == ROLES[role]
    assert set(plan.routes) == set(arrows(ROLES[role]))
    for (source, target), points in plan.routes.items():
        assert plan.boxes[source].has_on_border(points[0]), (source, target)
        assert plan.boxes[target].has_on_border(points[-1]), (source, target)
        for (x, y), (to_x, to_y) in pairwise(points):
            assert (x == to_x) != (y == to_y), (source, target, points)
        for x, y in points:
            assert 0 <= x < width and 0 <= y < plan.height


@pytest.mark.parametrize("role", ROLES)
def test_no_arrow_runs_through_a_box_and_none_stand_on_each_other(role):
    plan = plan_machine(ROLES[role], 116)
    inside = {
        (x, y) for box in plan.boxes.values() for x in range(box.x, box.right + 1) for y in range(box.y, box.bottom + 1)
    }
    assert len(inside) == sum(box.width * box.height for box in plan.boxes.values()), "two boxes overlap"
    for arrow, points in plan.routes.items():
        way = {
            (x, y)
            for (a, b), (c, d) in pairwise(points)
            for x in range(min(a, c), max(a, c) + 1)
            for y in range(min(b, d), max(b, d) + 1)
        }
        assert way & inside == {points[0], points[-1]}, arrow
    starts = {points[0] for points in plan.routes.values()}
    ends = {points[-1] for points in plan.routes.values()}
    assert not starts & ends, "an arrowhead would hide where another arrow begins"


def drawn(story, width=116, **flows) -> list[str]:
    picture = advance(Picture(url=story.url), story.observation(0.0))
    picture = advance(picture, story.observation(2.0))
    return [line.plain for line in render_machine(picture, width)]


def test_live_counts_and_flows_stand_in_the_drawing(story):
    lines = drawn(story)
    assert len(lines) == 11
    names = next(line for line in lines if "PrefillDone" in line)
    counts = lines[lines.index(names) + 1]
    assert counts.replace("│", " ").replace("▶", " ").replace("├", " ").replace("─", " ").split() == [
        *("1", "2.0", "1", "2.0", "0", "2.0", "6", "1.0", "0", "1.0", "206")
    ]
    assert counts.count("▶") == 5


def test_before_anything_is_known_nothing_is_shown_as_zero(story):
    lines = [line.plain for line in render_machine(Picture(url=story.url), 116)]
    assert not any(letter.isdigit() for line in lines for letter in line)
    assert sum(line.count("–") for line in lines) >= 9


def test_moving_arrows_are_bright_and_idle_ones_dim(story):
    picture = advance(Picture(url=story.url), story.observation(0.0))
    picture = advance(picture, story.observation(2.0))
    lines = render_machine(picture, 116)
    counts = next(line for line in lines if "2.0" in line.plain)
    styles = {str(span.style) for span in counts.spans if "▶" in counts.plain[span.start : span.end]}
    assert styles == {"flow"}
    bus = lines[0]
    assert {str(span.style) for span in bus.spans if "─" in bus.plain[span.start : span.end]} == {"idle"}


def test_a_role_with_a_peer_has_a_lane_more(story):
    state = story.state(story.snapshot())
    state["snapshot"]["states"] |= dict.fromkeys(("Bootstrapping", "RemotePrefilling"), 2)
    picture = advance(Picture(url=story.url), story.observation(state=state))
    lines = [line.plain for line in render_machine(picture, 116)]
    assert len(lines) == 15
    assert any("Bootstrapping" in line and "RemotePrefilling" in line for line in lines)
    assert not any("PrefillAwaitingResult" in line for line in lines)


def test_strokes_that_meet_join():
    canvas = Canvas(5, 3)
    canvas.line([(0, 1), (4, 1)], "idle")
    canvas.line([(2, 0), (2, 2)], "flow", rank=1)
    canvas.line([(4, 1), (4, 0)], "idle")
    assert [line.plain for line in canvas.lines()] == ["  ╷ ╷", "╶─┼─╯", "  ╵  "]
    middle = canvas.lines()[1]
    assert next(span.style for span in middle.spans if span.start <= 2 < span.end) == "flow"


def test_what_falls_off_the_canvas_is_left_out():
    canvas = Canvas(3, 1)
    canvas.line([(-2, 0), (9, 0)], "idle")
    canvas.line([(1, -5), (1, 5)], "idle")
    canvas.write(2, 0, "xyz", "idle")
    canvas.write(0, 3, "xyz", "idle")
    assert [line.plain for line in canvas.lines()] == ["─┼x"]
