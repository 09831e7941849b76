"""What tests of the live dashboard share: a source that the test feeds, and looks at the screen."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot

from tokenspeed_tui.app import Dashboard
from tokenspeed_tui.observation import Observation


class HandFed:
    """A source that brings what the test puts in; until then it is a server that does not answer.

    ``watched`` and ``requests`` have what was asked for, in order.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Observation] = asyncio.Queue()
        self.watched: list[bool] = []
        self.requests: list[str | None] = []

    async def observations(self) -> AsyncIterator[Observation]:
        while True:
            yield await self.queue.get()

    def watch_configuration(self, wanted: bool) -> None:
        self.watched.append(wanted)

    def watch_request(self, request: str | None) -> None:
        self.requests.append(request)


def shown(app: Dashboard) -> str:
    """The lines on the screen, without the list of keys."""
    return "\n".join(line.plain.rstrip() for line in app.dashboard.scene.lines)


def place(app: Dashboard, words: str) -> tuple[int, int]:
    """Column and row of the screen at which these words begin."""
    for row, line in enumerate(shown(app).splitlines()):
        if words in line:
            return line.index(words), row
    raise AssertionError(f"{words!r} is not on the screen:\n{shown(app)}")


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Lets the application run until the condition holds; the limit only ends a broken test."""
    async with asyncio.timeout(30):
        while not condition():
            await pilot.pause()


@asynccontextmanager
async def at_work(
    app: Dashboard,
    source: HandFed,
    story: Any,
    size: tuple[int, int] = (80, 24),
    moments: tuple[float, ...] = (0.0, 1.0),
) -> AsyncIterator[Pilot[None]]:
    """The dashboard on a screen, with a few answers in."""
    async with app.run_test(size=size, notifications=True) as pilot:
        for moment in moments:
            source.queue.put_nowait(story.observation(moment))
        await until(pilot, lambda: app.picture.polls == len(moments))
        yield pilot
