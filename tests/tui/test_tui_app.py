"""The live application: keys and mouse through Textual's pilot, and the whole program in a real terminal."""

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.text import Text
from textual import events
from textual.binding import Binding

from tokenspeed_tui.app import Dashboard
from tokenspeed_tui.controls import PAGES
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.observation import Observation
from tokenspeed_tui.operator import OperatorScreen
from tokenspeed_tui.recording import Recorder, ReplaySource, read_recording

COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


class HandFed:
    """A source that brings what the test puts in; until then it is a server that does not answer."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Observation] = asyncio.Queue()
        self.watched = False
        self.requests: list[str | None] = []

    async def observations(self) -> AsyncIterator[Observation]:
        while True:
            yield await self.queue.get()

    def watch_configuration(self, wanted: bool) -> None:
        self.watched = wanted

    def watch_request(self, request: str | None) -> None:
        self.requests.append(request)


@pytest.fixture
def source() -> HandFed:
    return HandFed()


@pytest.fixture
def dashboard(source, story) -> Dashboard:
    return Dashboard(source, story.url, interval=0.1)


def shown(app: Dashboard) -> str:
    return "\n".join(line.plain.rstrip() for line in app.dashboard.scene.lines)


def place(app: Dashboard, words: str) -> tuple[int, int]:
    """Where on the screen these words begin."""
    for row, line in enumerate(shown(app).splitlines()):
        if words in line:
            return line.index(words), row
    raise AssertionError(f"{words!r} is not on the screen:\n{shown(app)}")


async def until(pilot, condition) -> None:
    """Lets the application run until the condition holds; the limit only ends a broken test."""
    async with asyncio.timeout(30):
        while not condition():
            await pilot.pause()


@asynccontextmanager
async def at_work(dashboard, source, story, size=(80, 24), moments=(0.0, 1.0)):
    """The dashboard on a screen, with a few answers in."""
    async with dashboard.run_test(size=size) as pilot:
        for moment in moments:
            source.queue.put_nowait(story.observation(moment))
        await until(pilot, lambda: dashboard.picture.polls == len(moments))
        yield pilot


async def test_the_first_paint_needs_no_answer_and_keys_work_without_one(dashboard):
    async with dashboard.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "asking http://127.0.0.1:8000" in shown(dashboard)
        assert len(dashboard.dashboard.scene.lines) == 23
        await pilot.press("question_mark")
        assert "── Keys ──" in shown(dashboard)
        await pilot.press("q")
    assert dashboard.return_code == 0


async def test_pictures_replace_each_other(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        assert "decode      60.0 tok/s" in shown(dashboard)
        source.queue.put_nowait(story.observation(2.0, state=None, error="no server answers at http://x"))
        await until(pilot, lambda: "no server answers" in shown(dashboard))
        assert "decode      60.0 tok/s" in shown(dashboard)


# A test for every key.


async def test_1_2_3_4_show_the_pages(dashboard, source, story):
    words = {"1": "── States ──", "2": "── Requests ──", "3": "◆ pinned", "4": "ago ──"}
    async with at_work(dashboard, source, story) as pilot:
        for key in "2341":
            await pilot.press(key)
            assert dashboard.controls.shown == PAGES[key]
            assert words[key] in shown(dashboard)
        assert len([line for line in shown(dashboard).splitlines() if "chatcmpl" in line]) < 6


async def test_e_shows_the_events_and_goes_back(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("e")
        assert "── Events ──" in shown(dashboard) and "the client went away" in shown(dashboard)
        assert "── Advice ──" in shown(dashboard)
        await pilot.press("e")
        assert dashboard.controls.shown == "main"


async def test_s_sorts(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("s", "s", "s")
        assert dashboard.controls.sort == "prompt"
        assert "by prompt" in shown(dashboard)


async def test_arrows_and_letters_select_and_enter_opens(dashboard, source, story):
    async with dashboard.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        assert dashboard.controls.shown == "main", "there is no request to show yet"
        source.queue.put_nowait(story.observation(0.0))
        await until(pilot, lambda: "…00008" in shown(dashboard))
        for keys, handle in (
            (("down",), 7),
            (("j", "j", "k"), 6),
            (("up",), 7),
            (("pagedown",), 1),
            (("pageup",), 8),
            (("down", "enter"), 7),
        ):
            await pilot.press(*keys)
            assert dashboard.controls.selected == handle, keys
        assert "── Request ── #7 ── chatcmpl-00000007" in shown(dashboard)
        assert source.requests[-1] == "chatcmpl-00000007"
        await pilot.press("escape")
        assert "── Requests ──" in shown(dashboard)
        assert source.requests[-1] is None


async def test_enter_shows_what_the_server_tells_of_the_request(dashboard, source, story):
    detail = {
        "handle": 8,
        "request_id": "chatcmpl-00000008",
        "state": "Submitted",
        "time": story.epoch + 3.0,
        "arrived": story.epoch,
        "timeline": [
            {"state": "Prefilling", "time": story.epoch, "round": 1},
            {"state": "Retracted", "time": story.epoch + 1.0, "round": 7},
            {"state": "Submitted", "time": story.epoch + 2.0, "round": 9},
        ],
        "explain": ["capacity: short by 19 blocks", "position 1 of 4 in the queue"],
    }
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("enter")
        source.queue.put_nowait(story.observation(2.0, detail=detail))
        await until(pilot, lambda: "position 1 of 4" in shown(dashboard))
        assert "• capacity: short by 19 blocks" in shown(dashboard)
        assert "as the scheduler had it" in shown(dashboard)
        assert "P" * 27 + "X" * 27 + "S" * 26 in shown(dashboard)
        await pilot.press("p")
        source.queue.put_nowait(story.observation(3.0, detail=None, detail_error="the server knows nothing more of it"))
        await until(pilot, lambda: "position 1 of 4" not in shown(dashboard))


async def test_escape_goes_back_to_the_page_the_request_was_chosen_on(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("2", "enter", "escape")
        assert dashboard.controls.shown == "requests"
        await pilot.press("escape")
        assert dashboard.controls.shown == "main"
        await pilot.press("escape")
        assert dashboard.controls.shown == "main"


async def test_slash_filters_while_one_types(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("slash", *"prefil")
        assert dashboard.controls.pattern == "prefil"
        assert "── /prefil/ ──" in shown(dashboard)
        rows = [line for line in shown(dashboard).splitlines() if "…0000" in line]
        assert len(rows) == 1 and "Prefilling" in rows[0]
        await pilot.press("l", "enter", "s")
        assert (dashboard.controls.pattern, dashboard.controls.sort) == ("prefill", "age"), (
            "after Enter keys work again"
        )
        await pilot.press("enter")
        assert "── Request ── #7 ── chatcmpl-00000007" in shown(dashboard)
        await pilot.press("escape")
        assert dashboard.controls.pattern == "prefill"
        await pilot.press("escape")
        assert dashboard.controls.pattern == ""
        await pilot.press("slash", "x", "escape", "s")
        assert (dashboard.controls.pattern, dashboard.controls.sort) == ("", "state")


async def test_a_filter_that_lets_nothing_through_says_so(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("c", "slash", *"zz")
        assert dashboard.controls.shown == "requests"
        assert "none of 8 requests has 'zz'" in shown(dashboard)


async def test_g_shows_one_cache_group_after_the_other(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("g")
        assert dashboard.controls.group == "full"
        await pilot.press("3")
        assert "group full" in shown(dashboard)
        await pilot.press("g")
        assert dashboard.controls.group == ""


async def test_t_changes_the_theme(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        assert dashboard.theme == "tokenspeed-dark"
        await pilot.press("t")
        await pilot.pause()
        assert (dashboard.controls.theme, dashboard.theme) == ("light", "tokenspeed-light")
        assert "#00609a" in dashboard.export_screenshot()
        await pilot.press("t")
        await pilot.pause()
        assert dashboard.theme == "tokenspeed-dark"
        assert "#00609a" not in dashboard.export_screenshot()


async def test_p_holds_the_picture_and_says_so(dashboard, source, story):
    async with at_work(dashboard, source, story, moments=(0.0,)) as pilot:
        await pilot.press("p")
        assert "PAUSED" in shown(dashboard)
        source.queue.put_nowait(story.observation(1.0))
        await until(pilot, lambda: dashboard.dashboard.latest.polls == 2)
        assert dashboard.picture.polls == 1
        await pilot.press("p")
        assert dashboard.picture.polls == 2
        assert "PAUSED" not in shown(dashboard)


async def test_plus_and_minus_change_the_rate(dashboard):
    async with dashboard.run_test(size=(80, 24)) as pilot:
        await pilot.press("minus", "minus")
        assert dashboard.controls.interval == 0.5
        await pilot.press("plus", "equals_sign")
        assert dashboard.controls.interval == 0.1


async def test_brackets_change_the_window(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("right_square_bracket")
        assert "bars over 5m 00s" in shown(dashboard)
        await pilot.press("left_square_bracket", "left_square_bracket")
        assert "bars over 30 s" in shown(dashboard)


def test_every_key_has_a_test():
    """Each binding's key is pressed somewhere in the tests of the dashboard."""
    folder = Path(__file__).parent
    pressed = "".join(path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    for binding in [*DashboardScreen.BINDINGS, *OperatorScreen.BINDINGS]:
        assert isinstance(binding, Binding)
        for key in binding.key.split(","):
            assert f'"{key}"' in pressed or (key.isdigit() and f'"{key}":' in pressed), key


# The mouse.


async def test_a_click_selects_a_row_and_a_second_one_opens_it(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.click(offset=place(dashboard, "…00007"))
        assert dashboard.controls.selected == 7
        await pilot.click(offset=place(dashboard, "…00007"))
        assert "── Request ── #7 ── chatcmpl-00000007" in shown(dashboard)


async def test_a_click_on_a_panels_name_or_a_tab_shows_that(dashboard, source, story):
    async with at_work(dashboard, source, story, size=(120, 40)) as pilot:
        await pilot.click(offset=place(dashboard, "── KV cache"))
        assert dashboard.controls.shown == "cache"
        await pilot.click(offset=place(dashboard, "4 rates"))
        assert dashboard.controls.shown == "rates"
        await pilot.click(offset=(0, 1))
        assert dashboard.controls.shown == "rates", "what is no target does nothing"


async def test_the_wheel_moves_the_selection_and_scrolls(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        scene = dashboard.dashboard.scene
        await pilot._post_mouse_events([events.MouseScrollDown], scene, offset=(5, 5), button=0)
        await pilot.pause()
        assert dashboard.controls.selected == 5
        await pilot._post_mouse_events([events.MouseScrollUp], scene, offset=(5, 5), button=0)
        await pilot.pause()
        assert dashboard.controls.selected == 8


# The screen.


async def test_a_faster_rate_ends_a_long_wait(source, story):
    dashboard = Dashboard(source, story.url, interval=3600.0)
    async with dashboard.run_test(size=(80, 24)) as pilot:
        for moment in (0.0, 1.0):
            source.queue.put_nowait(story.observation(moment))
        await until(pilot, lambda: dashboard.picture.polls == 1)
        await pilot.press("plus")
        await until(pilot, lambda: dashboard.picture.polls == 2)


async def test_opening_a_request_does_not_wait_for_the_next_poll(source, story):
    dashboard = Dashboard(source, story.url, interval=3600.0)
    async with dashboard.run_test(size=(80, 24)) as pilot:
        for moment in (0.0, 1.0):
            source.queue.put_nowait(story.observation(moment))
        await until(pilot, lambda: dashboard.picture.polls == 1)
        await pilot.press("enter")
        await until(pilot, lambda: dashboard.picture.polls == 2)


async def test_resizing_changes_the_layout(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        scene = dashboard.dashboard.scene
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: len(scene.lines) == 39)
        assert "╭── States ──" in shown(dashboard) and "│PrefillDone│" in shown(dashboard)
        await pilot.resize_terminal(30, 8)
        await until(pilot, lambda: len(scene.lines) == 7)
        assert shown(dashboard).startswith("run 7 wait 1")


async def test_the_screen_shows_the_lines_and_the_keys(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.pause()
        picture = dashboard.export_screenshot().replace("&#160;", " ")
        for words in ("PrefillDone", "▒", "7 running, 1 waiting", "Quit", "Help", "Filter"):
            assert words in picture


async def test_only_lines_that_changed_are_drawn_again(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        scene = dashboard.dashboard.scene
        drawn: list[int] = []
        plain_line = scene.render_line

        def noted(y: int):
            drawn.append(y)
            return plain_line(y)

        scene.render_line = noted
        lines = list(scene.lines)
        lines[5] = Text("x" * 80)
        scene.show(lines, "dark")
        await until(pilot, lambda: bool(drawn))
        assert set(drawn) == {5}


async def test_the_help_scrolls_where_it_does_not_fit(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("question_mark")
        assert "0 lines above," in shown(dashboard) and "leave" in shown(dashboard)
        await pilot.press("pagedown", "pagedown", "pagedown")
        assert ", 0 below" in shown(dashboard) and "The mouse selects a row" in shown(dashboard)


def test_the_help_lists_every_key_there_is(dashboard):
    own = [binding for binding in DashboardScreen.BINDINGS if isinstance(binding, Binding)]
    assert len(dashboard.controls.keys) == len(own) == len(DashboardScreen.BINDINGS)
    assert [key.key for key in dashboard.controls.keys] == [
        *("q", "?", "p", "/", "s", "g", "t", "e", "c", "Enter", "Esc", "1", "2", "3", "4", "+", "-", "[", "]"),
        *("↑ k", "↓ j", "PgUp", "PgDn"),
    ]
    assert all(key.does for key in dashboard.controls.keys)


async def test_an_answer_that_comes_while_the_screen_is_gone_harms_nothing(dashboard, source, story):
    async with dashboard.run_test(size=(80, 24)) as pilot:
        await dashboard.dashboard.scene.remove()
        source.queue.put_nowait(story.observation(0.0))
        await until(pilot, lambda: dashboard.picture.polls == 1)
        await pilot.pause()
    assert dashboard.return_code != 1


async def test_recording_while_looking_and_replaying_it(source, story, tmp_path):
    path = tmp_path / "recording.jsonl"
    observations = [story.observation(moment) for moment in (0.0, 1.0, 2.0)]
    with Recorder(path) as recorder:
        app = Dashboard(source, story.url, interval=0.1, recorder=recorder)
        async with app.run_test(size=(80, 24)) as pilot:
            for observation in observations:
                source.queue.put_nowait(observation)
            await until(pilot, lambda: app.picture.polls == 3)
    assert list(read_recording(path)) == observations
    replay = Dashboard(ReplaySource(read_recording(path)), story.url, interval=0.1, replaying=True)
    async with replay.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: replay.controls.ended)
        assert "REPLAY ENDED" in shown(replay)
        assert "data 0.1 s old" in shown(replay)
        assert "decode      60.0 tok/s" in shown(replay)


async def test_a_full_disk_ends_the_recording_and_not_the_dashboard(source, story):
    with Recorder(Path("/dev/full")) as recorder:
        app = Dashboard(source, story.url, interval=0.1, recorder=recorder)
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            source.queue.put_nowait(story.observation(0.0))
            source.queue.put_nowait(story.observation(1.0))
            await until(pilot, lambda: app.picture.polls == 2)
            (notice,) = app._notifications
            assert notice.message == "the recording stopped: No space left on device"


def _read_until(terminal: int, wanted: bytes, collected: bytearray) -> None:
    """Reads the terminal's output until it holds ``wanted``; the limit only ends a broken test."""
    while wanted not in collected:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, f"{wanted!r} did not appear in {bytes(collected)!r}"
        collected += os.read(terminal, 65536)


def test_the_program_in_a_terminal_without_colour():
    """The real thing on a pseudo-terminal: it paints, says that no server answers, draws no colour, and quits on q."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    program = subprocess.Popen(
        [sys.executable, "-m", "tokenspeed_tui", "--url", "http://127.0.0.1:9", "--interval", "0.1"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    collected = bytearray()
    try:
        _read_until(controller, b"no server answers", collected)
        os.write(controller, b"q")
        # The alternate screen is left at the very end.
        _read_until(controller, b"\x1b[?1049l", collected)
        assert program.wait(timeout=30) == 0
    finally:
        if program.poll() is None:
            program.send_signal(signal.SIGKILL)
            program.wait()
        os.close(controller)
    assert b"PrefillDone" in collected
    assert not COLOUR.search(bytes(collected))


def test_the_dashboard_loads_nothing_of_the_engine():
    """It must run on a laptop: neither torch nor any room of the engine is imported."""
    code = (
        "import sys, tokenspeed_tui.app, tokenspeed_tui.client, tokenspeed_tui.once, tokenspeed_tui.command\n"
        "rooms = sorted(name for name in sys.modules if name.startswith('tokenspeed.') and name.count('.') == 1)\n"
        "print(rooms, 'torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['tokenspeed.messages', 'tokenspeed.telemetry'] False False"
