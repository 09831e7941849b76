"""The live application: what it draws and when, recordings, and the whole program in a real terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from dashboards import at_work, shown, until
from rich.text import Text

from tokenspeed_tui.app import Dashboard
from tokenspeed_tui.recording import Recorder, ReplaySource, read_recording

COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


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
