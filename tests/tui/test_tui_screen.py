"""Layout: which panels stand where, exactly as many lines and cells as there are, dashes for what is unknown."""

import msgspec
import pytest
from rich.text import Text

from tokenspeed.telemetry.snapshot import GroupSnapshot, StepSnapshot
from tokenspeed_tui.controls import PAGES, Controls, KeyWords
from tokenspeed_tui.observation import Probe
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.render.machine import state_count
from tokenspeed_tui.render.screen import size_class

KEYS = (KeyWords("q", "Quit", "leave"), KeyWords("s", "Sort", "order the requests"))
EVERY_PAGE = ("main", "requests", "cache", "rates", "events", "configuration", "detail", "help")


def as_text(lines: list[Text]) -> str:
    return "".join(line.plain.rstrip() + "\n" for line in lines)


def told(story, until: float = 4.0) -> Picture:
    picture = Picture(url=story.url)
    for half_seconds in range(int(2 * until) + 1):
        picture = advance(picture, story.observation(half_seconds / 2))
    return picture


def screen(picture, story, size=(80, 23), **chosen) -> list[str]:
    return as_text(render_screen(picture, Controls(keys=KEYS, **chosen), story.epoch + 4.3, *size)).splitlines()


def test_any_size_gives_exactly_that_size(story):
    observation = story.observation(4.5, configuration=story.configuration())
    picture = advance(told(story), observation)
    for width in (1, 2, 20, 75, 76, 111, 112, 250):
        for height in (1, 5, 17, 18, 33, 34, 60):
            for shown in EVERY_PAGE:
                controls = Controls(shown=shown, keys=KEYS, selected=8)
                lines = render_screen(picture, controls, story.epoch, width, height)
                assert [line.cell_len for line in lines] == [width] * height, (width, height, shown)


def test_wider_shows_more():
    """Sizes without the line of keys: a terminal has one row more."""
    assert size_class(75, 18) == size_class(76, 17) == size_class(300, 10) == "tiny"
    assert size_class(76, 18) == size_class(111, 50) == size_class(200, 33) == "normal"
    assert size_class(112, 34) == "wide"


def test_a_large_screen_shows_more_requests_and_events(story):
    small, large = (screen(told(story), story, size) for size in ((120, 39), (200, 70)))
    assert sum("…pl-0000" in line for line in large) > sum("…pl-0000" in line for line in small)
    assert len(max(large, key=len)) == 200


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_every_page_says_where_it_is_at_every_size(story, page):
    picture = advance(told(story), story.observation(4.5, configuration=story.configuration()))
    words = {"configuration": "Configuration", "detail": "Request", "help": "Keys", "main": "dec"}
    for size in ((120, 39), (80, 23), (40, 11)):
        text = "\n".join(screen(picture, story, size, shown=page, selected=8))
        assert words.get(page, page).lower() in text.lower()


def test_the_header_marks_the_page(story):
    lines = render_screen(told(story), Controls(shown="cache"), story.epoch, 120, 39)
    marked = [lines[0].plain[span.start : span.end] for span in lines[0].spans if span.style == "selected"]
    assert marked == [" 3 cache "]
    assert all(page in lines[0].plain for page in PAGES.values())


def test_the_detail_of_a_request_that_ended(story):
    assert any("It ended, or fell out of the table." in line for line in screen(told(story), story, shown="detail"))


def test_a_failed_engine_says_why(story):
    failed = story.observation(0.0, state=story.state(None, phase="failed", error="engine process died: signal 9"))
    assert "failed: engine process died: signal 9" in screen(advance(Picture(url=story.url), failed), story)[2]


def test_lost_engines_are_counted_in_the_header(story):
    state = story.state(None, phase="restarting", error="the engine process was ended by SIGKILL", lost=2)
    lines = screen(advance(Picture(url=story.url), story.observation(0.0, state=state)), story, (100, 23))
    assert "· 2 engines lost ·" in lines[1]
    assert lines[2].startswith("restarting: the engine process was ended by SIGKILL")


def test_the_phase_says_how_far_it_is(story):
    progress = {"name": "load", "done": 3, "total": 10, "since": story.epoch}
    state = story.state(None, phase="load", detail="shard", progress=progress)
    lines = screen(advance(Picture(url=story.url), story.observation(state=state)), story)
    assert lines[2] == "load 3 of 10: shard"


def test_a_server_that_went_away_keeps_the_last_picture_with_its_age(story):
    error = f"no server answers at {story.url} (the connection failed)"
    away = story.observation(64.0, state=None, error=error, live=Probe(), ready=Probe(), progress=Probe())
    picture = advance(told(story), away)
    text = as_text(render_screen(picture, Controls(), story.epoch + 64.3, 80, 23))
    assert "data STALE, 1m 00s old" in text
    assert "start one with" in text
    assert "live – · ready – · progress –" in text
    assert "60.0 tok/s" in text


def test_old_data_gives_no_all_clear(story):
    picture = told(story)
    fresh = [line.plain for line in render_screen(picture, Controls(), story.epoch + 4.3, 80, 23)]
    old = [line.plain for line in render_screen(picture, Controls(), story.epoch + 40.0, 80, 23)]
    assert any("nothing needs turning" in line for line in fresh)
    assert not any("nothing needs turning" in line for line in old)
    assert "data STALE" in old[1]


def test_states_that_the_role_does_not_have_are_dashes_and_empty_ones_are_zeros(story):
    picture = told(story)
    assert state_count(picture, "Bootstrapping") is None
    assert state_count(picture, "Restoring") == 0
    lines = screen(picture, story)
    bootstrapping = next(line for line in lines if "Bootstrapping" in line)
    restoring = next(line for line in lines if "Restoring" in line)
    assert bootstrapping.split()[:3] == ["1", "Bootstrapping", "–"]
    assert restoring.split()[-3:] == ["10", "Restoring", "0"]
    (foot,) = [line for line in screen(picture, story, (120, 39)) if "not in this role" in line]
    assert "– Bootstrapping RemotePrefilling PrefillAwaitingResult" in foot


def test_several_groups_share_the_room(story):
    counts = {"total": 8, "held": 4, "cached": 2, "free": 2}
    state = story.state(story.snapshot())
    state["snapshot"]["groups"] = [{"group_id": f"group{number}", **counts} for number in range(30)]
    picture = advance(Picture(url=story.url), story.observation(state=state))
    assert any("more: 3 shows all, g one" in line for line in screen(picture, story))
    wide = screen(picture, story, (120, 39))
    assert any("more: 3 shows all, g one" in line for line in wide)
    assert any("decode         – tok/s" in line for line in wide)
    alone = screen(picture, story, group="group7")
    assert any("group7 device  █ held 4" in line for line in alone)
    assert not any("group8" in line for line in alone)


def test_before_the_first_step_its_parts_are_unknown(story):
    counters = msgspec.structs.replace(story.snapshot().counters, steps=0)
    idle = story.snapshot(0.0, counters=counters, step=StepSnapshot(plan_ms=0, device_ms=0, commit_ms=0, bubble_ms=0))
    picture = advance(Picture(url=story.url), story.observation(0.0, state=story.state(idle)))
    assert any("step ms P plan – D device – C commit – B bubble –" in line for line in screen(picture, story))


def test_a_recipe_without_a_profile_is_named_alone(story):
    state = story.state(story.snapshot(), profile="")
    picture = advance(Picture(url=story.url), story.observation(state=state))
    assert "smollm2-135m · smollm2-135m #3f9a17c2 · cpu × 1" in screen(picture, story, (100, 23))[0]
    bare = advance(Picture(url=story.url), story.observation(state=story.state(None, recipe="", recipe_hash="")))
    assert "smollm2-135m · – #– · cpu × 1" in screen(bare, story, (100, 23))[0]


def test_the_device_stands_for_its_vendor_until_an_engine_told(story):
    loading = story.state(None, vendor=None, device="cuda", devices=4)
    picture = advance(Picture(url=story.url), story.observation(state=loading))
    assert "#3f9a17c2 · cuda × 4 ·" in screen(picture, story, (100, 23))[0]
    told = story.state(None, vendor="amd", device="cuda", devices=4)
    picture = advance(Picture(url=story.url), story.observation(state=told))
    assert "#3f9a17c2 · amd × 4 ·" in screen(picture, story, (100, 23))[0]


def test_a_paused_engine_is_named_in_the_header(story):
    snapshot = story.snapshot(paused=True)
    picture = advance(Picture(url=story.url), story.observation(state=story.state(snapshot)))
    assert "ENGINE PAUSED" in screen(picture, story)[1]


def test_hostile_names_neither_steer_the_terminal_nor_break_the_columns(story):
    names = ["\x1b[31mred\x1b[2J", "宽" * 300, "a\nb\tc", "\u202egnp.exe", "x" * 100_000, "👩‍👩‍👧‍👦" * 40]
    rows = [
        msgspec.structs.replace(story.snapshot().requests[0], handle=handle, request_id=name, reason=name)
        for handle, name in enumerate(names)
    ]
    group = msgspec.structs.replace(story.snapshot().groups[0], group_id=names[0], map="\x1b[2J" + "h" * 500)
    assert isinstance(group, GroupSnapshot)
    state = story.state(story.snapshot(requests=rows, groups=[group]), model=names[1], recipe=names[2])
    picture = advance(Picture(url=story.url), story.observation(state=state, error=""))
    for width, height in ((120, 39), (80, 23), (40, 11)):
        for shown in EVERY_PAGE:
            lines = render_screen(picture, Controls(shown=shown, selected=1), story.epoch, width, height)
            assert [line.cell_len for line in lines] == [width] * height
            assert all(line.plain.isprintable() for line in lines)
