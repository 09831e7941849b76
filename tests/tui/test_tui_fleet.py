"""Several servers: the table, its keys, a server's own screen above it, and what is found without being named."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from tokenspeed_tui import fleet as module
from tokenspeed_tui import main
from tokenspeed_tui.client import STATE_PATH
from tokenspeed_tui.controls import Controls
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.fleet import Fleet
from tokenspeed_tui.local import Found
from tokenspeed_tui.observation import RECORDING_VERSION, Observation, Probe
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render.fleet import Member, cache_use, render_fleet, state_word

A, B, C = "http://a:8000", "http://b:8000", "http://192.168.1.7:8123"


class PaperServer:
    """A source that says what the test put down, as often as it is asked."""

    def __init__(self, *observations: Observation) -> None:
        self.observed = list(observations)
        self.asked = 0

    async def observations(self) -> AsyncIterator[Observation]:
        while True:
            self.asked += 1
            yield self.observed[min(self.asked, len(self.observed)) - 1]

    def watch_configuration(self, wanted: bool) -> None: ...

    def watch_request(self, request: str | None) -> None: ...


@pytest.fixture
def looks(story):
    """Makes pictures of a server: at work, or as it is said."""

    def look(url: str, *moments: float, **changes) -> list[Observation]:
        return [story.observation(moment, url=url, **changes) for moment in moments or (0.0, 1.0)]

    return look


@pytest.fixture
def away():
    def observation(url: str) -> Observation:
        words = f"no server answers at {url} (the connection failed)"
        return Observation(version=RECORDING_VERSION, time=1_750_000_000.0, url=url, error=words)

    return observation


def picture_of(url: str, observations: list[Observation]) -> Picture:
    picture = Picture(url=url)
    for observation in observations:
        picture = advance(picture, observation)
    return picture


def text_of(lines) -> str:
    return "\n".join(line.plain.rstrip() for line in lines) + "\n"


def some(story, looks, away) -> list[Member]:
    loading = story.state(None, phase="load", detail="shard 3 of 10", model="kimi-k2.5")
    other = story.state(story.snapshot(1.0, running=3, waiting=12), model="qwen3\x1b[2J-中文-with-a-long-name")
    return [
        Member(picture_of(A, looks(A)), "pid 17226"),
        Member(picture_of(B, looks(B, 0.0, state=loading)), ""),
        Member(picture_of(C, [*looks(C, 1.0, state=other), away(C)]), "container gpu (podman)"),
    ]


@pytest.mark.parametrize(("width", "height"), [(40, 8), (80, 12), (130, 12)])
def test_a_row_each(story, looks, away, check_text, width, height):
    lines = render_fleet(some(story, looks, away), C, Controls(), story.epoch + 1.4, width, height)
    assert len(lines) == height
    assert all(line.cell_len == width for line in lines)
    check_text(f"fleet-{width}x{height}", text_of(lines))


def test_the_selected_row_is_in_view(looks):
    members = [Member(picture_of(f"http://h{number}:1", looks(f"http://h{number}:1", 0.0)), "") for number in range(40)]
    for number in (0, 17, 39):
        shown = text_of(render_fleet(members, f"http://h{number}:1", Controls(), 0.0, 100, 12))
        (row,) = [line for line in shown.splitlines() if "> " in line]
        assert f"h{number}:1" in row


def test_no_server_says_how_to_get_one():
    assert "make run starts one" in text_of(render_fleet([], None, Controls(), 0.0, 100, 10))


def test_a_word_for_each_way_to_be(story, looks, away):
    stuck = looks(A, 0.0, progress=Probe(status=503))
    paused = looks(A, 0.0, state=story.state(story.snapshot(0.0, paused=True)))
    failed = looks(A, 0.0, state=story.state(None, phase="failed", error="no memory"))
    words = {
        "ready": looks(A, 0.0),
        "stuck": stuck,
        "paused": paused,
        "failed": failed,
        "load": looks(A, 0.0, state=story.state(None, phase="load")),
        "away": [*looks(A, 0.0), away(A)],
        "asking": [],
    }
    for word, observations in words.items():
        assert state_word(picture_of(A, observations), Controls(), story.epoch + 0.5)[0] == word
    assert state_word(picture_of(A, looks(A, 0.0)), Controls(), story.epoch + 60)[0] == "stale"


def test_the_fullest_group_is_the_cache_s_use(story, looks):
    groups = story.snapshot().groups
    assert cache_use(picture_of(A, looks(A, 0.0))) == pytest.approx(groups[0].held / groups[0].total)
    assert cache_use(Picture(url=A)) is None


async def until(pilot, condition) -> None:
    """Lets the application run until the condition holds; the limit only ends a broken test."""
    async with asyncio.timeout(30):
        while not condition():
            await pilot.pause()


def shown(app: Fleet) -> str:
    return text_of(app.fleet.scene.lines)


@pytest.fixture
def app(looks, away) -> Fleet:
    servers = {A: PaperServer(*looks(A)), B: PaperServer(away(B))}
    return Fleet([A, B], servers.__getitem__, interval=0.1)


async def test_enter_opens_a_server_and_esc_comes_back(app):
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "smollm2-135m" in shown(app) and "away" in shown(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DashboardScreen))
        await until(pilot, lambda: app.screen.picture.polls > 0)
        assert app.screen.picture.url == A
        assert "Submitted" in text_of(app.screen.scene.lines)
        await pilot.press("c", "escape")
        assert isinstance(app.screen, DashboardScreen), "the first Esc goes to its overview"
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.fleet)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, DashboardScreen))
        assert app.screen.picture.url == B
        await pilot.press("q")
    assert app.return_code == 0


async def test_keys_select_explain_and_change_the_theme(app):
    async with app.run_test(size=(100, 20)) as pilot:
        for key, url in (("up", A), ("j", B), ("down", B), ("k", A)):
            await pilot.press(key)
            assert app.fleet.selected == url
        await pilot.press("question_mark")
        for words in ("the server above", "the selected server's own screen", "change between dark and light"):
            assert words in shown(app)
        await pilot.press("enter")
        assert app.screen is app.fleet, "there is nothing selected on the page of the keys"
        await pilot.press("escape")
        assert "── Servers ──" in shown(app)
        await pilot.press("t")
        assert (app.fleet.controls.theme, app.theme) == ("light", "tokenspeed-light")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DashboardScreen))
        assert app.screen.controls.theme == "light"
        await pilot.press("t", "escape")
        await until(pilot, lambda: app.screen is app.fleet)
        await until(pilot, lambda: app.fleet.controls.theme == "dark")


async def test_a_click_selects_and_a_second_one_opens(app):
    async with app.run_test(size=(100, 20)) as pilot:
        await until(pilot, lambda: "smollm2-135m" in shown(app) and "away" in shown(app))
        row = next(row for row, line in enumerate(app.fleet.scene.lines) if "b:8000" in line.plain)
        await pilot.click(app.fleet.scene, offset=(10, row))
        assert app.fleet.selected == B
        await pilot.click(app.fleet.scene, offset=(10, row))
        await until(pilot, lambda: isinstance(app.screen, DashboardScreen))


async def test_what_is_found_comes_and_goes_and_what_was_named_stays(looks, away, monkeypatch):
    monkeypatch.setattr(module, "FIND_S", 0.01)
    monkeypatch.setattr(module, "LEAST_INTERVAL_S", 0.01)
    servers = {A: PaperServer(away(A)), B: PaperServer(*looks(B))}
    here = [Found(B, "smollm2-135m", "pid 4711")]
    app = Fleet([A], servers.__getitem__, interval=0.05, find=lambda: list(here))
    async with app.run_test(size=(120, 20)) as pilot:
        await until(pilot, lambda: "pid 4711" in shown(app) and "smollm2-135m" in shown(app))
        here.clear()
        await pilot.pause(0.1)
        assert B in app.fleet.members, "it answers, so it stays"
        servers[B].observed = [away(B)]
        await until(pilot, lambda: B not in app.fleet.members)
        assert list(app.fleet.members) == [A]
        assert app.fleet.selected == A


def test_once_prints_a_row_each_and_json_all_of_it(story, tiny_server, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("TOKENSPEED_URL", raising=False)
    moments = iter(range(10_000))
    tiny_server.answers[STATE_PATH] = (200, lambda: story.state(story.snapshot(next(moments) / 2)))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{held.getsockname()[1]}"
    both = ["--url", tiny_server.url, "--url", gone, "--once", "--interval", "0.05"]
    assert main(both) == 1
    printed = capsys.readouterr().out
    assert "ready" in printed
    assert "away" in printed
    assert main([*both, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["servers"]
    assert [one["url"] for one in told] == [tiny_server.url, gone]
    assert told[0]["state"]["snapshot"]["running"] == 7
    assert told[1]["error"].startswith(f"no server answers at {gone}")
    monkeypatch.setenv("TOKENSPEED_URL", f"{tiny_server.url} {tiny_server.url}/")
    assert main(["--once", "--json", "--interval", "0.05"]) == 0
    assert json.loads(capsys.readouterr().out)["url"] == tiny_server.url, "one address, named twice"


class PaperMachine:
    def __init__(self, *urls: str) -> None:
        self._found = [Found(url, "model", "pid 1") for url in urls]

    def servers(self):
        return self._found

    find = servers


def test_what_runs_here_is_looked_at_without_being_named(story, tiny_server, capsys, monkeypatch):
    monkeypatch.delenv("TOKENSPEED_URL", raising=False)
    moments = iter(range(10_000))
    tiny_server.answers[STATE_PATH] = (200, lambda: story.state(story.snapshot(next(moments) / 2)))
    once = ["--once", "--json", "--interval", "0.05"]
    assert main(once, PaperMachine(tiny_server.url)) == 0
    assert json.loads(capsys.readouterr().out)["url"] == tiny_server.url
    other = tiny_server.url.replace("127.0.0.1", "localhost")
    assert main(once, PaperMachine(tiny_server.url, other)) == 0
    assert [one["url"] for one in json.loads(capsys.readouterr().out)["servers"]] == [tiny_server.url, other]
    assert main(["--fleet", *once], PaperMachine(tiny_server.url)) == 0
    assert len(json.loads(capsys.readouterr().out)["servers"]) == 1
    assert main(["--fleet", *once], PaperMachine()) == 1


def test_what_is_for_one_server_is_refused(capsys, monkeypatch):
    monkeypatch.delenv("TOKENSPEED_URL", raising=False)
    assert main(["--url", A, "--url", B, "--record", "x"]) == 2
    assert "are for one server" in capsys.readouterr().err
    assert main(["--url", "ftp://x", "--url", B]) == 2
    assert "names no HTTP server" in capsys.readouterr().err
    assert main(["--url", A, "--url", B]) == 2
    assert "needs a terminal" in capsys.readouterr().err
    for extra in (["--demo"], ["--replay", "x"]):
        with pytest.raises(SystemExit):
            main(["--fleet", *extra])
        assert "--fleet is of servers" in capsys.readouterr().err
