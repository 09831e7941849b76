"""Draws the dashboard as SVG, from a live server or from a recording: the picture in the README.

    python scripts/dashboard_screenshot.py --url http://127.0.0.1:8000
    python scripts/dashboard_screenshot.py --replay recording.jsonl --output docs/images/dashboard.svg

A recording is made with ``tokenspeed top --record recording.jsonl`` (or ``--once --record``).
"""

import argparse
import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tokenspeed_tui.app import Dashboard
from tokenspeed_tui.client import HttpSource, normalised_url
from tokenspeed_tui.observation import Observation, Source
from tokenspeed_tui.recording import ReplaySource, read_recording

FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
LIVE_INTERVAL_S = 0.5


class Counted:
    """The first ``most`` observations of a source, with an event that is set when they are through."""

    def __init__(self, source: Source, most: int) -> None:
        self._source = source
        self._most = most
        self.done = asyncio.Event()
        self.error = ""

    async def observations(self) -> AsyncIterator[Observation]:
        """Yields them; the last one is on the screen when the event is set."""
        taken = 0
        async for observation in self._source.observations():
            yield observation
            taken += 1
            self.error = observation.error
            if taken == self._most:
                break
        self.done.set()

    def watch_configuration(self, wanted: bool) -> None:
        """Tells the source."""
        self._source.watch_configuration(wanted)

    def watch_request(self, request: str | None) -> None:
        """Tells the source."""
        self._source.watch_request(request)


async def draw(source: Source, url: str, *, looks: int, replaying: bool, size: tuple[int, int], keys: list[str]) -> str:
    """Presses ``keys``, lets the dashboard look ``looks`` times and returns the screen as SVG.

    Raises RuntimeError where the last look at a live server brought no state.
    """
    counted = Counted(source, looks)
    app = Dashboard(counted, url, interval=0.05 if replaying else LIVE_INTERVAL_S, replaying=replaying)
    async with app.run_test(size=size) as pilot:
        await pilot.press(*keys)
        await counted.done.wait()
        await pilot.pause()
        if counted.error:
            raise RuntimeError(counted.error)
        svg = app.export_screenshot(title="tokenspeed top")
    # The exporter names web fonts; a picture that is looked at offline falls back on a monospace font anyway.
    return FONT_FACE.sub("", svg)


def main() -> int:
    """Parses the arguments, draws, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draws the dashboard as SVG.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a running server (default: %(default)s)")
    parser.add_argument("--replay", type=Path, help="draw the end of this recording instead")
    parser.add_argument("--looks", type=int, default=8, help="how often to look at the server (default: %(default)s)")
    parser.add_argument("--press", nargs="*", default=[], metavar="KEY", help="keys to press first (c: configuration)")
    parser.add_argument("--width", type=int, default=120)
    parser.add_argument("--height", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("docs/images/dashboard.svg"))
    arguments = parser.parse_args()
    source: Source
    if arguments.replay is not None:
        observations = read_recording(arguments.replay)
        source, url, looks = ReplaySource(observations), observations[0].url, len(observations)
    else:
        url, looks = normalised_url(arguments.url), arguments.looks
        source = HttpSource(url)
    size = (arguments.width, arguments.height)
    try:
        replaying = arguments.replay is not None
        svg = asyncio.run(draw(source, url, looks=looks, replaying=replaying, size=size, keys=arguments.press))
    except RuntimeError as error:
        print(f"no picture was drawn: {error}", file=sys.stderr)
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(svg, encoding="utf-8")
    print(f"{arguments.output} shows {url} after {looks} looks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
