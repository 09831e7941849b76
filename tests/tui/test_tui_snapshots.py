"""What people see, at three sizes and in both themes, in the five situations that matter.

A snapshot has the screen's letters, then a grid with a letter for the style of each cell, then what each letter looks
like in the dark and in the light theme.
"""

import functools
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from tokenspeed.telemetry.snapshot import EventSnapshot, RequestSnapshot
from tokenspeed_tui.controls import Controls
from tokenspeed_tui.observation import Probe
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.themes import THEMES

SIZES = {"40x12": (40, 11), "80x24": (80, 23), "120x40": (120, 39)}
"""Without the line of keys, which belongs to the terminal application."""
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def followed(story, moments, **changes) -> Picture:
    picture = Picture(url=story.url)
    for moment in moments:
        picture = advance(picture, story.observation(moment, **changes))
    return picture


def empty(story) -> tuple[Picture, float]:
    """An engine that has nothing to do."""
    idle = {name: 0 if count is not None else None for name, count in story.snapshot().states.items()}
    picture = Picture(url=story.url)
    for moment in (0.0, 1.0, 2.0):
        snapshot = msgspec.structs.replace(
            story.snapshot(0.0, time=story.epoch + moment), states=idle, requests=[], events=[], running=0, waiting=0
        )
        quiet = msgspec.structs.replace(snapshot, has_work=False, flows=[], latency=None, headroom=None)
        picture = advance(picture, story.observation(moment, state=story.state(quiet)))
    return picture, story.epoch + 2.4


@functools.cache
def busy(story) -> tuple[Picture, float]:
    """Two hundred requests, a host pool, retractions: everything that can move moves."""
    picture = Picture(url=story.url)
    for second in range(70):
        moment = float(second)
        base = story.snapshot(moment)
        states = base.states | {"Submitted": 40, "Prefilling": 3, "Decoding": 150, "Retracted": 6, "Restoring": 1}
        rows = [
            msgspec.structs.replace(
                base.requests[2],
                handle=handle,
                request_id=f"chatcmpl-{handle:08x}",
                state="Retracted" if handle < 6 else "Submitted" if handle < 46 else "Decoding",
                reason="capacity: short by 19 blocks" if handle < 46 else "",
                age_s=200.0 - handle,
            )
            for handle in range(200)
        ]
        flows = [msgspec.structs.replace(flow, count=flow.count + round(3 * moment)) for flow in base.flows]
        counters = msgspec.structs.replace(base.counters, retractions=round(moment), evictions=17 * round(moment))
        snapshot = msgspec.structs.replace(
            base, states=states, requests=rows, flows=flows, counters=counters, running=153, waiting=47
        )
        snapshot = msgspec.structs.replace(snapshot, host=base.groups, requests_omitted=31)
        observation = story.observation(moment, state=story.state(snapshot), configuration=story.configuration())
        picture = advance(picture, observation)
    return picture, story.epoch + 69.3


def stuck(story) -> tuple[Picture, float]:
    """Work waits, nothing moves, and the server says so too."""
    head = RequestSnapshot(
        handle=9,
        request_id="chatcmpl-00000009",
        state="Submitted",
        age_rounds=0,
        priority=0,
        prompt_tokens=900,
        computed_tokens=0,
        generated_tokens=0,
        cached_tokens=0,
        blocks=0,
        retractions=0,
        reason="waits for cache operation 17",
        age_s=42.0,
    )
    event = EventSnapshot(
        sequence=3, time=story.epoch - 12.0, kind="stuck", request_id="", text="no step landed for 30 s"
    )
    picture = followed(story, (-2.0, -1.0))
    snapshot = story.snapshot(0.0, last_progress=story.epoch - 42.0, requests=[head], events=[event])
    hanging = story.observation(0.0, state=story.state(snapshot), progress=Probe(status=503))
    return advance(picture, hanging), story.epoch + 0.3


def restarting(story) -> tuple[Picture, float]:
    """The engine process was lost, and the next one loads."""
    state = story.state(None, phase="load", detail="shard 3 of 10", lost=1, ready=False)
    starting = story.observation(5.0, state=state, ready=Probe(status=503), progress=Probe(status=404))
    return advance(followed(story, (0.0, 1.0)), starting), story.epoch + 5.2


def disconnected(story) -> tuple[Picture, float]:
    """The server does not answer: the last picture stays, with its age."""
    error = f"no server answers at {story.url} (the connection failed)"
    away = story.observation(64.0, state=None, error=error, live=Probe(), ready=Probe(), progress=Probe())
    return advance(followed(story, (0.0, 1.0, 2.0, 3.0, 4.0)), away), story.epoch + 64.3


SCENES: dict[str, Callable[..., tuple[Picture, float]]] = {
    scene.__name__: scene for scene in (empty, busy, stuck, restarting, disconnected)
}


def looks(lines: list[Text], theme: str) -> list[list[str]]:
    """The style of every cell, resolved by a theme."""
    console = Console(theme=THEMES[theme], width=300)
    rows = []
    for line in lines:
        cells: list[str] = []
        for segment in line.render(console):
            cells += [str(segment.style) if segment.style else ""] * segment.cell_length
        rows.append(cells)
    return rows


def as_snapshot(lines: list[Text]) -> str:
    dark, light = looks(lines, "dark"), looks(lines, "light")
    legend: dict[tuple[str, str], str] = {}
    grid = []
    for dark_row, light_row in zip(dark, light, strict=True):
        pairs = list(zip(dark_row, light_row, strict=True))
        grid.append("".join(legend.setdefault(pair, LETTERS[len(legend)]) for pair in pairs))
    letters = [line.plain.rstrip() for line in lines]
    names = [f"{letter}  dark: {pair[0] or '–'}  light: {pair[1] or '–'}" for pair, letter in legend.items()]
    return "\n".join([*letters, "", *grid, "", *names, ""])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scene", SCENES)
def test_the_screen(story, check_text, scene, size):
    picture, now = SCENES[scene](story)
    lines = render_screen(picture, Controls(), now, *SIZES[size])
    assert [line.cell_len for line in lines] == [SIZES[size][0]] * SIZES[size][1]
    check_text(f"{scene}-{size}", as_snapshot(lines))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", ["requests", "cache", "rates", "events"])
def test_the_pages_of_a_busy_engine(story, check_text, page, size):
    picture, now = busy(story)
    lines = render_screen(picture, Controls(shown=page), now, *SIZES[size])
    check_text(f"{page}-{size}", "".join(line.plain.rstrip() + "\n" for line in lines))


@pytest.mark.parametrize("size", SIZES)
def test_the_skeleton_before_any_network(story, check_text, size):
    lines = render_screen(Picture(url=story.url), Controls(), story.epoch, *SIZES[size])
    text = "".join(line.plain.rstrip() + "\n" for line in lines)
    check_text(f"skeleton-{size}", text)
    figures = text.replace(story.url, "").replace("0 kept", "").replace("1m 00s", "")
    # Else the numbers of the states are the only digits: nothing unknown is shown as 0.
    assert " 0" not in figures
