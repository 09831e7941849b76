"""The configuration panel: what it shows, also of a real server, its keys, and where else it is kept."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from app_server import serving
from dashboards import HandFed, shown, until
from rich.text import Text
from scripted_engine import Stack, scripted_config, snapshot

from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.server.app import create_app
from tokenspeed.server.configuration import ConfigurationBody, KeyBody, MemoryBody
from tokenspeed_tui import configuration, main
from tokenspeed_tui.app import Dashboard
from tokenspeed_tui.client import CONFIGURATION_PATH, STATE_PATH, HttpSource
from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.recording import Recorder, ReplaySource, read_recording
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.render.configuration import deviation, last_scroll
from tokenspeed_tui.render.screen import scrolled

MEMORY = {"weights": 1 << 20, "workspace": 3 << 20, "sum": 4 << 20}
PREDICTED = {"weights": 1 << 20, "workspace": 2 << 20}


def as_text(lines: list[Text]) -> str:
    return "".join(line.plain.rstrip() + "\n" for line in lines)


def told(story, **changes: Any) -> Picture:
    observation = story.observation(configuration=story.configuration(**changes))
    return advance(Picture(url=story.url), observation)


def panel(picture: Picture, width: int = 80, height: int = 23, **controls: Any) -> str:
    return as_text(render_screen(picture, Controls(shown="configuration", **controls), 1_750_000_000.3, width, height))


# What is shown.


@pytest.mark.parametrize("size", [(80, 23), (120, 39)])
def test_the_panel(story, check_text, size):
    check_text(f"configuration-{size[0]}x{size[1] + 1}", panel(told(story), *size))


def test_what_something_set_comes_first_and_the_rest_scrolls_by(story, check_text):
    picture = told(story)
    top = panel(picture).splitlines()
    keys = [line.split()[0] for line in top[5:]]
    assert keys[:2] == ["kv.bytes", "scheduler.max_seqs"]
    assert top[6].split() == ["scheduler.max_seqs", "7", "SET", "scheduler.max_seqs"]
    assert "0 above, 12 below" in top[4]
    controls = Controls(shown="configuration")
    end = scrolled(picture, controls, story.epoch, 80, 23, 1000)
    assert end == last_scroll(picture, 19, 80) == 12
    assert scrolled(picture, controls, story.epoch, 80, 23, -1) == 0
    bottom = panel(picture, scroll=end)
    check_text("configuration-scrolled-80x24", bottom)
    assert "12 above, 0 below" in bottom and "drain_s" in bottom
    assert panel(picture, scroll=4711) == bottom, "a scroll beyond the end shows the end"


def test_a_missing_figure_is_a_dash_and_zero_is_zero(story):
    rows = {line.split("  ")[0]: line.split()[-5:] for line in panel(told(story)).splitlines()}
    assert rows["host pool"] == ["pool", "0", "B", "–", "–"]
    assert rows["state"][-4:] == ["–", "4.0", "MiB", "–"]
    assert rows["weights"][-2:] == ["0.0", "%"]
    assert rows["libraries"][-2:] == ["+25.0", "%"]
    unset = [line for line in panel(told(story), scroll=9).splitlines() if line.startswith("kv.fraction")]
    assert unset == ["kv.fraction                              –"]


def test_deviations():
    assert deviation(1000, 1004) == "+0.4 %"
    assert deviation(1000, 900) == "-10.0 %"
    assert deviation(10_000_000, 10_000_001) == "0.0 %"
    assert deviation(0, 5) == deviation(None, 5) == deviation(5, None) == "–"
    assert deviation(5, 0) == "-100.0 %"


def test_nothing_told_yet_a_recording_without_it_and_an_older_server(story):
    picture = advance(Picture(url=story.url), story.observation())
    assert "The server has not told it yet." in panel(picture)
    assert "The recording holds no configuration up to here." in panel(picture, replaying=True)
    old = advance(told(story), story.observation(configuration_error="this server is older " + 20 * "and older "))
    text = panel(old)
    assert text.splitlines()[5].startswith("this server is older and")
    assert "kv.bytes" not in text, "what another server said is not shown for this one"
    assert "kv.bytes" in panel(advance(old, story.observation(1.0, configuration=story.configuration())))


def test_without_a_plan_the_memory_says_so(story):
    assert "neither the plan nor the engine" in panel(told(story, memory={"predicted": {}, "observed": {}}))


def test_any_size_gives_exactly_that_size(story):
    for picture in (told(story), told(story, keys=[]), Picture(url=story.url)):
        for width in (1, 20, 76, 80, 131, 250):
            for height in (1, 5, 17, 18, 19, 23, 50):
                controls = Controls(shown="configuration", scroll=5)
                lines = render_screen(picture, controls, story.epoch, width, height)
                assert [line.cell_len for line in lines] == [width] * height, (width, height)


# What is read of the server.


def test_the_views_mirror_what_the_server_writes():
    told_of = set(ConfigurationBody.__struct_fields__) - {"memory"}
    memory = set(MemoryBody.__struct_fields__)
    assert set(configuration.ConfigurationView.__struct_fields__) == told_of | memory
    assert configuration.KeyView.__struct_fields__ == KeyBody.__struct_fields__


def test_what_is_missing_or_odd_is_unknown(story):
    read = configuration.read_configuration(
        {
            "recipe_hash": 5,
            "started": "once",
            "keys": [3, {"key": ["a"], "value": {}}, {"key": "b\x1b", "value": "x\n  y\x07", "source": None}],
            "memory": {"predicted": {"weights": "much", "sum": True, "kv": 3}, "observed": [1]},
        }
    )
    assert (read.recipe_hash, read.started, read.predicted, read.observed) == (None, None, {"kv": 3}, {})
    assert read.keys == (configuration.KeyView(), configuration.KeyView(key="b?", value="x y?"))
    assert configuration.read_configuration({"keys": 3, "memory": 3}) == configuration.ConfigurationView()
    picture = advance(Picture(url=story.url), story.observation(configuration={"keys": [{"key": "b", "value": 1}]}))
    assert panel(picture).splitlines()[5].split() == ["b", "1", "–"]


def test_the_kernels_stand_below_the_memory(story):
    kernels = {f"operation{number}": f"kernel-{number}" for number in range(30)}
    state = story.state(story.snapshot(), facts={"kernels": kernels})
    picture = advance(told(story), story.observation(1.0, state=state))
    wide = panel(picture, 120, 39)
    assert "── Kernels ── 30 operations ──" in wide
    assert all(f"{operation} {kernel}" in wide for operation, kernel in kernels.items())
    assert panel(picture).splitlines()[-1].endswith("…"), "a small screen shows as many as fit in a line"
    none = advance(told(story), story.observation(1.0, state=story.state(story.snapshot(), facts={})))
    assert panel(none).splitlines()[-1] == "–"


# A real server.


def configured(max_seqs: int, source: str) -> ResolvedConfig:
    return scripted_config().model_copy(
        update={
            "settings": {"scheduler.max_seqs": max_seqs, "scheduler.chunk": 256, "env.HF_TOKEN": "hush-hush"},
            "sources": {"scheduler.max_seqs": source, "scheduler.chunk": "default", "env.HF_TOKEN": "recipe"},
            "predicted": PREDICTED,
        }
    )


@asynccontextmanager
async def real_server(config: ResolvedConfig, port: int = 0, uptime_s: float = 60.0) -> AsyncIterator[str]:
    """The real application with a scripted engine that is ready since ``uptime_s`` seconds."""
    stack = Stack(config)
    try:
        engine = await stack.new_engine(ready=False)
        await engine.send_status("ready", facts={"max_model_len": 512, "memory": MEMORY})
        await engine.send_snapshot(snapshot(uptime_s=uptime_s))
        while stack.llm.engine.snapshot is None:
            await stack.llm.engine.changed()
        async with serving(create_app(stack.llm), port) as url:
            yield url
    finally:
        await stack.close()


async def test_the_panel_on_a_real_server():
    async with real_server(configured(64, "default")) as url:
        app = Dashboard(HttpSource(url), url, interval=0.1)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.picture.server is not None)
            await pilot.press("c")
            await until(pilot, lambda: "scheduler.max_seqs" in shown(app))
            first = shown(app).splitlines()
            assert [line.split() for line in first[5:8]] == [
                ["env.HF_TOKEN", "***", "recipe"],
                ["scheduler.max_seqs", "64"],
                ["scheduler.chunk", "256"],
            ]
            table = [line.split() for line in first if line.startswith(("weights", "workspace", "sum"))]
            assert table == [
                ["weights", "1.0", "MiB", "1.0", "MiB", "0.0", "%"],
                ["workspace", "2.0", "MiB", "3.0", "MiB", "+50.0", "%"],
                ["sum", "3.0", "MiB", "4.0", "MiB", "+33.3", "%"],
            ]
            await pilot.press("escape")
            assert "── Requests ──" in shown(app)
            await pilot.press("c")
            await pilot.press("c")
            assert "── Requests ──" in shown(app)


async def test_a_restart_with_another_value_shows_it_and_its_source():
    """Another server takes the place of the first; no timer tells the panel, the clock stands still."""

    def line(app: Dashboard) -> list[str]:
        return next((line.split() for line in shown(app).splitlines() if line.startswith("scheduler.max_seqs")), [])

    async with AsyncExitStack() as first:
        url = await first.enter_async_context(real_server(configured(64, "default")))
        app = Dashboard(HttpSource(url, clock=lambda: 0.0), url, interval=0.1)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("c")
            await until(pilot, lambda: line(app) == ["scheduler.max_seqs", "64"])
            await first.aclose()
            await until(pilot, lambda: app.picture.error)
            port = int(url.rpartition(":")[2])
            async with real_server(configured(7, "SET scheduler.max_seqs"), port, uptime_s=0.0):
                await until(pilot, lambda: line(app) == ["scheduler.max_seqs", "7", "SET", "scheduler.max_seqs"])


# Keys, recordings, scripts.


async def test_the_keys_of_the_panel(story):
    source = HandFed()
    app = Dashboard(source, story.url, interval=0.1)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("c")
        source.queue.put_nowait(story.observation(configuration=story.configuration()))
        await until(pilot, lambda: app.picture.configuration is not None)
        await pilot.press("up")
        assert app.controls.scroll == 0
        await pilot.press("down", "down")
        assert app.controls.scroll == 2 and "2 above, 10 below" in shown(app)
        await pilot.press("pagedown", "pagedown", "up")
        assert app.controls.scroll == 11
        assert app.controls.selected is None, "the selection of the table behind it stays"
        await pilot.press("pageup", "pageup")
        assert app.controls.scroll == 0
        await pilot.press("c")
        assert app.controls.shown == "main", "the same key again goes back"
        await pilot.press("c")
        await pilot.press("escape", "down", "c")
        assert app.controls.scroll == 0 and app.controls.selected is not None
        await pilot.press("question_mark")
        assert "c         every setting with its source" in shown(app)
    assert source.watched == [True], "the advisor names values, so it is asked for from the beginning"


async def test_the_footer_names_every_key_in_80_columns(story):
    source = HandFed()
    app = Dashboard(source, story.url, interval=0.1)
    async with app.run_test(size=(80, 24)) as pilot:
        for keys in ([], ["c"], ["question_mark"]):
            await pilot.press(*keys)
            await pilot.pause()
            assert app.query_one("Footer").virtual_size.width <= 80
            names = [str(key.description) for key in app.query_one("Footer").children]
            assert ("Back" in names) == bool(keys) and {"Quit", "Help", "Filter", "Sort", "Config"} <= set(names)


async def test_a_picture_that_pause_holds_gets_the_configuration_it_lacks(story):
    source = HandFed()
    app = Dashboard(source, story.url, interval=0.1)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(story.observation(0.0))
        await until(pilot, lambda: app.picture.polls == 1)
        await pilot.press("p", "c")
        source.queue.put_nowait(story.observation(1.0, configuration=story.configuration()))
        await until(pilot, lambda: "kv.bytes" in shown(app))
        assert app.picture.polls == 1


async def test_a_recording_has_it_whether_or_not_the_panel_was_open(tmp_path):
    path = tmp_path / "recording.jsonl"
    async with real_server(configured(7, "--max-num-seqs")) as url:
        with Recorder(path) as recorder:
            app = Dashboard(HttpSource(url), url, interval=0.1, recorder=recorder)
            async with app.run_test(size=(80, 24)) as pilot:
                await until(pilot, lambda: app.picture.polls >= 2)
    observations = read_recording(path)
    assert observations[0].configuration is not None
    assert all(later.configuration is None for later in observations[1:]), "only what is new is written"
    replay = Dashboard(ReplaySource(observations), url, interval=0.1, replaying=True)
    async with replay.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: replay.controls.ended)
        await pilot.press("c")
        assert "scheduler.max_seqs  7    --max-num-seqs" in shown(replay)


def test_once_json_has_it_and_a_replay_the_same(story, tiny_server, tmp_path, capsys):
    moments = iter(range(100))
    tiny_server.answers[STATE_PATH] = (200, lambda: story.state(story.snapshot(next(moments) / 2)))
    tiny_server.answers[CONFIGURATION_PATH] = (200, story.configuration())
    path = str(tmp_path / "recording.jsonl")
    assert main(["--url", tiny_server.url, "--once", "--json", "--interval", "0.05", "--record", path]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["configuration"] == story.configuration() and printed["configuration_error"] is None
    assert main(["--replay", path, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == printed
    assert [path for path, _ in tiny_server.asked].count(CONFIGURATION_PATH) == 1


def test_once_json_of_an_older_server_says_why_there_is_none(story, tiny_server, capsys):
    moments = iter(range(100))
    tiny_server.answers[STATE_PATH] = (200, lambda: story.state(story.snapshot(next(moments) / 2)))
    assert main(["--url", tiny_server.url, "--once", "--json", "--interval", "0.05"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["configuration"] is None
    assert printed["configuration_error"].startswith("this server is older than the dashboard")
