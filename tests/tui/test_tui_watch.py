"""A film under the dashboard: every key that goes somewhere, through Textual's pilot."""

import asyncio
import threading
from typing import Any

import pytest
from textual.binding import Binding

from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.film import BEHIND, Progress, Shot, View, look
from tokenspeed_tui.render import text as t
from tokenspeed_tui.watch import LEAP, OWN_KEYS, Place, RoundLine, Watch, WatchScreen, render_place

EVENTS = (40, 700, 2_000)


class PaperFilm:
    """3,000 rounds of the story, a second each; ``gate`` holds the thread that asks."""

    title = "engine.journal"
    warning = ""

    def __init__(self, story: Any) -> None:
        self._story = story
        self.length = 3_000
        self.asked: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.progress = False

    def shot(self, number: int, progress: Progress) -> Shot:
        if self.progress:
            progress(12, number)
        assert self.gate.wait(30)
        number = min(max(number, 1), self.length)
        self.asked.append(number)
        return Shot(number, self._story.state(self._story.snapshot(float(number))), f"decided in {number}")

    def next_event(self, number: int, *, forward: bool, progress: Progress) -> int | None:
        ahead = [one for one in EVENTS if (one > number) == forward and one != number]
        return (min(ahead) if forward else max(ahead)) if ahead else None

    def detail(self, request: str, number: int, progress: Progress) -> dict[str, Any] | None:
        if request != "chatcmpl-00000003":
            return None
        return {"handle": 3, "request_id": request, "state": "Decoding", "explain": [f"as of round {number}"]}


@pytest.fixture
def film(story) -> PaperFilm:
    return PaperFilm(story)


@pytest.fixture
def app(film) -> Watch:
    return Watch(film)


async def at(pilot, app: Watch, number: int) -> None:
    """Lets the application run until that round is shown; the limit only ends a broken test."""
    async with asyncio.timeout(30):
        while app.dashboard.place.number != number or app.dashboard.place.doing:
            await pilot.pause()


async def test_every_key_goes_where_it_says(app):
    async with app.run_test(size=(120, 40)) as pilot:
        await at(pilot, app, 1)
        ways = [
            ("right", 2), ("right", 3), ("left", 2), ("pagedown", 2 + LEAP), ("pageup", 2), ("pageup", 1), ("left", 1),
            ("end", 3_000), ("right", 3_000), ("N", 2_000), ("N", 700), ("n", 2_000), ("home", 1), ("n", 40),
        ]  # fmt: skip
        for key, number in ways:
            await pilot.press(key)
            await at(pilot, app, number)
            assert app.dashboard.picture.snapshot.time == pytest.approx(1_750_000_000.0 + number)
        await pilot.press("q")
    assert app.return_code == 0


async def test_keys_that_come_faster_than_the_film_add_up(app, film):
    async with app.run_test(size=(80, 24)) as pilot:
        await at(pilot, app, 1)
        film.gate.clear()
        film.asked.clear()
        await pilot.press("right", "right", "pagedown", "right", "left", "right")
        film.gate.set()
        await at(pilot, app, 1 + 3 + LEAP)
        assert len(set(film.asked)) <= 2 + BEHIND + 1, "what lies between was not looked at"


async def test_a_round_can_be_typed(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await at(pilot, app, 1)
        await pilot.press("g", *"1234", "enter")
        await at(pilot, app, 1_234)
        assert not app.screen.query(RoundLine)
        await pilot.press("g", "7", "escape")
        await pilot.pause()
        assert not app.screen.query(RoundLine)
        await pilot.press("g", *"99999", "enter")
        await at(pilot, app, 3_000)
        await pilot.press("g", "enter", "left")
        await at(pilot, app, 2_999)


async def test_space_plays_to_the_end_and_stops(film):
    film.length = 6
    app = Watch(film, start=2, interval=0.05)
    async with app.run_test(size=(80, 24)) as pilot:
        await at(pilot, app, 2)
        await pilot.press("space")
        await at(pilot, app, 6)
        async with asyncio.timeout(30):
            while app.dashboard.place.playing:
                await pilot.pause()


async def test_space_stops_what_plays(film):
    app = Watch(film, interval=0.05)
    async with app.run_test(size=(80, 24)) as pilot:
        await at(pilot, app, 1)
        await pilot.press("space")
        async with asyncio.timeout(30):
            while app.dashboard.place.number < 3:
                await pilot.pause()
        await pilot.press("space")
        assert not app.dashboard.place.playing
        await pilot.press("home")
        await at(pilot, app, 1)


async def test_no_event_that_way_is_said(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await at(pilot, app, 1)
        await pilot.press("N")
        async with asyncio.timeout(30):
            while not app._notifications:
                await pilot.pause()
        (notice,) = app._notifications
        assert notice.message.startswith("nothing was retracted, restored, aborted or refused before")
        assert app.dashboard.place.number == 1


async def test_a_request_is_explained_as_of_each_round(app):
    async with app.run_test(size=(120, 40)) as pilot:
        await at(pilot, app, 1)
        app.dashboard.change(selected=3)
        for keys, number in ((("enter",), 1), (("right", "right"), 3), (("left",), 2)):
            await pilot.press(*keys)
            await until_shown(pilot, app, f"as of round {number}")
        await pilot.press("escape")
        app.dashboard.change(selected=4)
        await pilot.press("enter")
        async with asyncio.timeout(30):
            while "is not in the journal up to round 2" not in app.dashboard.picture.detail_error:
                await pilot.pause()


async def until_shown(pilot, app: Watch, words: str) -> None:
    async with asyncio.timeout(30):
        while words not in "\n".join(line.plain for line in app.dashboard.scene.lines):
            await pilot.pause()


async def test_a_long_way_says_how_far_it_is_and_does_not_hold_the_program(app, film):
    async with app.run_test(size=(80, 24)) as pilot:
        await at(pilot, app, 1)
        film.progress = True
        film.gate.clear()
        await pilot.press("end")
        async with asyncio.timeout(30):
            while app.dashboard.place.doing != "going to round 3,000: 12 made again":
                await pilot.pause()
        await pilot.press("question_mark")
        assert app.dashboard.controls.shown == "help", "the screen goes on meanwhile"
        film.gate.set()
        await at(pilot, app, 3_000)


async def test_a_film_that_is_shorter_than_it_said_ends_early(app, film):
    async with app.run_test(size=(120, 40)) as pilot:
        await at(pilot, app, 1)
        film.length, film.warning = 77, "the film ends here: the plans differ"
        await pilot.press("end")
        await at(pilot, app, 77)
        assert app.dashboard.place.warning in render_place(app.dashboard.place, 120).plain


def test_a_view_is_the_same_from_both_sides(film):
    """Rates and courses of a round do not depend on how one came to it."""
    forward = None
    for number in range(100, 106):
        forward = look(film, forward, number, lambda done, target: None)
    back = look(film, View(140, forward.picture, ""), 105, lambda done, target: None)
    assert (forward.number, forward.decided) == (back.number, back.decided) == (105, "decided in 105")
    assert forward.picture.rates == back.picture.rates
    assert forward.picture.samples == back.picture.samples
    assert forward.picture.rates.decode_tokens == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(1_184, 37_587, "retracted 59"), "■ round 1,184 of 37,587  retracted 59"),
        (Place(3, 9, "quiet", playing=True), "▶ round 3 of 9  quiet"),
        (
            Place(3, 9, "quiet", doing="going to round 8: 4 made again"),
            "■ round 3 of 9  going to round 8: 4 made again",
        ),
        (Place(9, 9, "quiet", warning="the film ends here"), "■ round 9 of 9  the film ends here"),
        (Place(8, 9, "quiet", warning="the film ends here"), "■ round 8 of 9  quiet"),
        (Place(1, 9, "a\u4e2d" * 40), "■ round 1 of 9  a\u4e2d"),
    ],
)
def test_the_place_is_one_line(place: Place, words: str) -> None:
    line = render_place(place, 60)
    assert line.cell_len == 60
    assert line.plain.startswith(words)
    assert t.ELLIPSIS in line.plain or line.plain.rstrip() == words


def test_keys_that_mean_nothing_to_a_film_are_gone_and_the_others_stay():
    keys = {binding.key: binding for binding in WatchScreen.BINDINGS if isinstance(binding, Binding)}
    assert len(keys) == len(WatchScreen.BINDINGS)
    assert {binding.key for binding in OWN_KEYS} <= set(keys)
    for binding in DashboardScreen.BINDINGS:
        meaningless = binding.action in ("pause", "show('configuration')")
        assert (binding.key in keys) is (not meaningless or binding.key in {own.key for own in OWN_KEYS})
    assert keys["pagedown"].action == f"step({LEAP})"
