"""Draws the pictures of the dashboard in README and docs as SVG, from its demo: the same seed, the same pictures.

python scripts/dashboard_screenshot.py                    # all of them, into docs/images
python scripts/dashboard_screenshot.py --only dashboard   # one of them
python scripts/dashboard_screenshot.py --replay run.jsonl --press c --output picture.svg    # of a recording
"""

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from textual.app import App
from textual.screen import Screen

from tokenspeed.cli.film import JournalFilm
from tokenspeed.launch.demo import Demo, demo_world
from tokenspeed.launch.scheduling import compose_scheduler
from tokenspeed.recipes.resolved import SchedulerSettings
from tokenspeed_tui.app import ThemedApp
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.demo import URL, DemoSource
from tokenspeed_tui.fleet import FleetScreen
from tokenspeed_tui.observation import Observation, Source
from tokenspeed_tui.recording import ReplaySource, read_recording
from tokenspeed_tui.themes import ThemeName
from tokenspeed_tui.watch import Watch

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
EPOCH = 1_780_000_000.0
LOOKS = 64
"""Looks of a second each before the keys: the bars span a minute."""

LOOKS_BEHIND = 3
"""And behind the keys: what a page asks for comes with the next look."""

Size = tuple[int, int]


class Picture(NamedTuple):
    """A picture: its file's name, the keys that lead to it, and how it is drawn."""

    name: str
    keys: tuple[str, ...] = ()
    size: Size = (126, 44)
    theme: ThemeName = "dark"


PICTURES = (
    Picture("dashboard"),
    Picture("dashboard-light", theme="light"),
    Picture("dashboard-small", size=(80, 24)),
    Picture("dashboard-request", ("enter",), (110, 30)),
    Picture("dashboard-cache", ("3",), (110, 30)),
    Picture("dashboard-events", ("e",), (110, 30)),
)
FLEET, REPLAY = "dashboard-fleet", "dashboard-replay"
NAMES = (*(picture.name for picture in PICTURES), FLEET, REPLAY)
SMALL: Size = (110, 12)
SERVERS = {"http://gpu-1:8000": 0, "http://gpu-2:8000": 3, "http://gpu-3:8000": 5}
"""Address to the seed of what is served there."""


class Gated:
    """A source that stops after ``most`` observations until ``go`` is set, and for good after ``behind`` more."""

    def __init__(self, source: Source, most: int, behind: int) -> None:
        self._source = source
        self._most, self._behind = most, behind
        self.there, self.go, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.watch_configuration = source.watch_configuration
        self.watch_request = source.watch_request

    async def observations(self) -> AsyncIterator[Observation]:
        """Each is on the screen when the next one is asked for, so an event is set when the last of its part is."""
        taken = 0
        async for observation in self._source.observations():
            yield observation
            taken += 1
            if taken == self._most:
                self.there.set()
                await self.go.wait()
            if taken == self._most + self._behind:
                break
        self.there.set()
        self.done.set()
        await asyncio.Event().wait()


class StillScreen(DashboardScreen):
    """A server's screen on which it is always the moment of the last look, and no time passes between looks."""

    def now(self) -> float:
        """The moment of the last look."""
        return self.latest.seen or 0.0

    async def _pause_between_polls(self) -> None:
        await asyncio.sleep(0)


class StillFleet(FleetScreen):
    """The servers' screen, the same way."""

    def now(self) -> float:
        """The moment of the last look at any of them."""
        return max((member.picture.seen or 0.0 for member in self.members.values()), default=0.0)

    async def pause(self) -> None:
        """Goes on at once."""
        await asyncio.sleep(0)


class Still(ThemedApp):
    """The application around one screen."""

    def __init__(self, screen: Screen[None], theme: ThemeName) -> None:
        super().__init__(theme)
        self._first = screen

    def get_default_screen(self) -> Screen[None]:
        """The screen that was given."""
        return self._first


async def draw(picture: Picture, source: Source, url: str, *, looks: int = LOOKS, behind: int = LOOKS_BEHIND) -> str:
    """The screen of one server as SVG, after ``looks``, the picture's keys, and ``behind`` more looks."""
    gated = Gated(source, looks, behind)
    app = Still(StillScreen(gated, url, interval=1.0, theme=picture.theme), picture.theme)
    async with app.run_test(size=picture.size) as pilot:
        await gated.there.wait()
        await pilot.press(*picture.keys)
        gated.go.set()
        await gated.done.wait()
        await pilot.pause()
        return svg_of(app)


async def draw_fleet(size: Size, *, looks: int = 6) -> str:
    """The servers of SERVERS, as SVG."""
    sources = {url: Gated(demo_source(seed, url), looks, 0) for url, seed in SERVERS.items()}
    fleet = StillFleet(list(SERVERS), sources.__getitem__, interval=1.0, theme="dark")
    async with Still(fleet, "dark").run_test(size=size) as pilot:
        for source in sources.values():
            await source.there.wait()
        await pilot.press("down")
        await pilot.pause()
        return svg_of(pilot.app)


async def draw_replay(size: Size) -> str:
    """The third event of the demo's journal, as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "engine.journal"
        Demo(0, EPOCH, compose_scheduler(SchedulerSettings(journal=str(journal)), demo_world())).advance(30.0)
        app = Watch(JournalFilm(journal))
        async with app.run_test(size=size) as pilot:
            for keys, moved in (((), 0), (("n",), 1), (("n",), 1), (("n",), 1)):
                before = app.dashboard.place.number
                await pilot.press(*keys)
                while app.dashboard.place.doing or app.dashboard.place.number <= before - (not moved):
                    await pilot.pause(0.01)
            return svg_of(app)


def svg_of(app: App[None]) -> str:
    """What is on the screen; without the web's fonts, for a picture that is looked at offline."""
    return FONT_FACE.sub("", app.export_screenshot(title=app.TITLE or "tokenspeed top"))


def demo_source(seed: int = 0, url: str = URL) -> DemoSource:
    """A demo whose looks are a second apart."""
    return DemoSource(lambda: Demo(seed, EPOCH), step=1.0, url=url)


def draw_all(names: Sequence[str], folder: Path) -> None:
    """Draws pictures by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {picture.name: picture for picture in PICTURES}
    for name in names:
        if name == FLEET:
            svg = asyncio.run(draw_fleet(SMALL))
        elif name == REPLAY:
            svg = asyncio.run(draw_replay((126, 44)))
        else:
            svg = asyncio.run(draw(drawn[name], demo_source(), URL))
        path = folder / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        print(f"{path}: {len(svg) >> 10} KiB")


def main() -> int:
    """Parses the arguments, draws, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draws the dashboard as SVG.")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, help="these pictures of the demo")
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where they go (default: docs/images)")
    parser.add_argument("--replay", type=Path, help="draw the end of this recording instead")
    parser.add_argument("--press", nargs="*", default=[], metavar="KEY", help="with --replay: keys to press first")
    parser.add_argument("--output", type=Path, default=Path("dashboard.svg"), help="with --replay: the file")
    arguments = parser.parse_args()
    if arguments.replay is None:
        draw_all(arguments.only, arguments.folder)
        return 0
    observations = read_recording(arguments.replay)
    picture = Picture(arguments.output.stem, tuple(arguments.press))
    source, looks = ReplaySource(observations), len(observations)
    svg = asyncio.run(draw(picture, source, observations[0].url, looks=looks, behind=0))
    arguments.output.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
