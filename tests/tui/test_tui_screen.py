"""What people see, as text, at the sizes that matter."""

import msgspec
import pytest
from rich.text import Text

from tokenspeed.telemetry.snapshot import StepSnapshot
from tokenspeed_tui.controls import Controls
from tokenspeed_tui.observation import Probe
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.render.screen import size_class
from tokenspeed_tui.render.states import state_count

SIZES = {"80x24": (80, 23), "120x40": (120, 39), "40x10": (40, 9)}
"""Without the line of keys, which belongs to the terminal application."""
KEYS = (("q", "Quit"), ("s", "Sort"))


def as_text(lines: list[Text]) -> str:
    return "".join(line.plain.rstrip() + "\n" for line in lines)


def told(story, until: float = 4.0) -> Picture:
    picture = Picture(url=story.url)
    for half_seconds in range(int(2 * until) + 1):
        picture = advance(picture, story.observation(half_seconds / 2))
    return picture


@pytest.mark.parametrize("size", SIZES)
def test_a_working_engine(story, check_text, size):
    lines = render_screen(told(story), Controls(keys=KEYS), story.epoch + 4.3, *SIZES[size])
    check_text(f"working-{size}", as_text(lines))


@pytest.mark.parametrize("size", SIZES)
def test_the_skeleton_before_any_network(story, check_text, size):
    lines = render_screen(Picture(url=story.url), Controls(keys=KEYS), story.epoch, *SIZES[size])
    check_text(f"skeleton-{size}", as_text(lines))
    figures = as_text(lines).replace(story.url, "")
    # The numbers of the states are the only digits: nothing unknown is shown as 0.
    assert " 0" not in figures


def test_a_server_that_went_away_keeps_the_last_picture_with_its_age(story, check_text):
    away = story.observation(
        64.0,
        state=None,
        error=f"no server answers at {story.url} (the connection failed)",
        live=Probe(),
        ready=Probe(),
        progress=Probe(),
    )
    lines = render_screen(advance(told(story), away), Controls(keys=KEYS), story.epoch + 64.3, 80, 23)
    text = as_text(lines)
    check_text("away-80x24", text)
    assert "data STALE, 1m 00s old" in text
    assert "start one with" in text
    assert "live – · ready – · progress –" in text


def test_an_engine_that_starts_shows_its_phase(story, check_text):
    starting = story.observation(
        0.0,
        state=story.state(None, phase="load", detail="shard 3 of 10"),
        ready=Probe(status=503),
        progress=Probe(status=404),
    )
    lines = render_screen(advance(Picture(url=story.url), starting), Controls(keys=KEYS), story.epoch + 0.1, 80, 23)
    text = as_text(lines)
    check_text("starting-80x24", text)
    assert "load: shard 3 of 10" in text
    assert "ready NO (503) · progress –" in text


def test_a_failed_engine_says_why(story):
    failed = story.observation(0.0, state=story.state(None, phase="failed", error="engine process died: signal 9"))
    lines = render_screen(advance(Picture(url=story.url), failed), Controls(), story.epoch, 80, 23)
    assert "failed: engine process died: signal 9" in lines[2].plain


def test_lost_engines_are_counted_in_the_header(story):
    state = story.state(None, phase="restarting", error="the engine process was ended by SIGKILL", lost=2)
    picture = advance(Picture(url=story.url), story.observation(0.0, state=state))
    lines = render_screen(picture, Controls(), story.epoch, 100, 23)
    assert "· 2 engines lost ·" in lines[1].plain
    assert lines[2].plain.startswith("restarting: the engine process was ended by SIGKILL")


def test_an_engine_that_hangs_is_called_stuck(story):
    snapshot = story.snapshot(0.0, last_progress=story.epoch - 40)
    hanging = story.observation(0.0, state=story.state(snapshot), progress=Probe(status=503))
    lines = render_screen(advance(Picture(url=story.url), hanging), Controls(), story.epoch, 80, 23)
    assert lines[2].plain.startswith("STUCK: work is waiting and no step landed for 40 s")


def test_states_that_the_role_does_not_have_are_dashes_and_empty_ones_are_zeros(story):
    picture = told(story)
    assert state_count(picture, "Bootstrapping") is None
    assert state_count(picture, "Restoring") == 0
    lines = as_text(render_screen(picture, Controls(), story.epoch, 120, 39)).splitlines()
    bootstrapping = next(line for line in lines if "Bootstrapping" in line)
    restoring = next(line for line in lines if "Restoring" in line)
    assert bootstrapping[:31].split() == ["1", "Bootstrapping", "–"]
    assert restoring[:31].split() == ["10", "Restoring", "0"]


@pytest.mark.parametrize("shown", ["detail", "help"])
def test_other_views(story, check_text, shown):
    controls = Controls(keys=KEYS, shown=shown, selected=8)
    check_text(f"{shown}-80x24", as_text(render_screen(told(story), controls, story.epoch + 4.3, 80, 23)))


def test_the_detail_of_a_request_that_ended(story):
    controls = Controls(shown="detail", selected=4711)
    lines = render_screen(told(story), controls, story.epoch, 80, 23)
    assert "It ended, or fell out of the table." in as_text(lines)


def test_the_selected_row_stays_in_view(story):
    controls = Controls(selected=8)
    lines = as_text(render_screen(told(story), controls, story.epoch, 80, 23)).splitlines()
    (row,) = [line for line in lines if line.startswith("> ")]
    assert "Submitted" in row
    assert row.endswith("19 blocks short")
    assert lines[-1] == "3 more above, 0 more below"


def test_several_groups_share_the_room(story, check_text):
    counts = {"total": 8, "held": 4, "cached": 2, "free": 2}
    groups = [{"group_id": f"group{number}", **counts} for number in range(5)]
    state = story.state(story.snapshot())
    state["snapshot"]["groups"] = groups
    picture = advance(Picture(url=story.url), story.observation(state=state))
    text = as_text(render_screen(picture, Controls(), story.epoch, 80, 23))
    check_text("groups-80x24", text)
    assert "3 more groups" in text


def test_any_size_gives_exactly_that_size(story):
    picture = told(story)
    for width in (1, 2, 7, 20, 60, 75, 76, 80, 109, 110, 131, 250):
        for height in (1, 2, 5, 17, 18, 23, 31, 32, 50):
            for shown in ("main", "help", "detail"):
                lines = render_screen(picture, Controls(shown=shown, keys=KEYS), story.epoch, width, height)
                assert [line.cell_len for line in lines] == [width] * height, (width, height, shown)


def test_before_the_first_step_its_parts_are_unknown(story):
    counters = msgspec.structs.replace(story.snapshot().counters, steps=0)
    idle = story.snapshot(0.0, counters=counters, step=StepSnapshot(plan_ms=0, device_ms=0, commit_ms=0, bubble_ms=0))
    picture = advance(Picture(url=story.url), story.observation(0.0, state=story.state(idle)))
    text = as_text(render_screen(picture, Controls(), story.epoch, 80, 23))
    assert "step ms plan – device – commit – bubble –" in text


def test_wider_shows_more():
    """Sizes without the line of keys: a terminal has one row more."""
    assert size_class(75, 18) == size_class(76, 17) == size_class(300, 10) == "tiny"
    assert size_class(76, 18) == size_class(109, 50) == size_class(200, 31) == "normal"
    assert size_class(110, 32) == "wide"


def test_many_groups_leave_room_for_the_rates_on_a_wide_screen(story):
    state = story.state(story.snapshot())
    state["snapshot"]["groups"] = [
        {"group_id": f"group{number}", "held": 1, "cached": 1, "free": 1} for number in range(30)
    ]
    picture = advance(Picture(url=story.url), story.observation(state=state))
    text = as_text(render_screen(picture, Controls(), story.epoch, 120, 39))
    assert "24 more groups" in text
    assert "decode  – tok/s" in text
    assert "prefix hits" in text


def test_a_recipe_without_a_profile_is_named_alone(story):
    state = story.state(story.snapshot(), profile="")
    picture = advance(Picture(url=story.url), story.observation(state=state))
    first = render_screen(picture, Controls(), story.epoch, 100, 23)[0].plain
    assert "smollm2-135m · smollm2-135m #3f9a17c2 · cpu × 1" in first
    bare = advance(Picture(url=story.url), story.observation(state=story.state(None, recipe="", recipe_hash="")))
    assert "smollm2-135m · – #– · cpu × 1" in render_screen(bare, Controls(), story.epoch, 100, 23)[0].plain
