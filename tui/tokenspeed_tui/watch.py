"""The dashboard over a film: a journal's rounds, one by one, forward and back.

Keys only say where to go; one thread beside the screen goes there, and where keys come faster than it does, only the
last place that was asked for counts.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import ClassVar, NamedTuple, cast

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from tokenspeed_tui.app import ThemedApp
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.film import Film, View, look, with_detail
from tokenspeed_tui.observation import Observation
from tokenspeed_tui.render import text as t
from tokenspeed_tui.scene import Scene
from tokenspeed_tui.themes import ThemeName

LEAP = 50
"""Rounds that PgUp and PgDn go."""

Errand = Callable[[], "View | str"]
"""What the film's thread does next: it comes back with a view, or with words why there is none."""


class Place(NamedTuple):
    """Where the film is: the frame that is shown, how many there are, what was decided there, what is being done."""

    number: int = 0
    length: int = 0
    decided: str = ""
    doing: str = ""
    warning: str = ""
    playing: bool = False


def render_place(place: Place, width: int) -> Text:
    """One line: the round, and what is being done, what is wrong, or what the round decided."""
    symbol = "▶" if place.playing else "■"
    line = t.line((f"{symbol} round {place.number:,} of {place.length:,}", t.TITLE_STYLE), "  ")
    if place.doing:
        line.append(place.doing, t.WARN_STYLE)
    elif place.warning and place.number == place.length:
        line.append(place.warning, t.BAD_STYLE)
    else:
        line.append(place.decided)
    return t.cut(line, width)


class PlaceBar(Scene):
    """Shows the line of render_place."""

    DEFAULT_CSS = "PlaceBar { height: 1; }"


class RoundLine(Input):
    """Takes the number of a round, and goes away."""

    DEFAULT_CSS = "RoundLine { height: 1; border: none; padding: 0; background: $background; }"
    DEFAULT_CSS += "\nRoundLine:focus { border: none; }"

    class Chosen(Message):
        """A number was typed."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    @on(Input.Changed)
    def _not_a_filter(self, event: Input.Changed) -> None:
        event.stop()

    @on(Input.Submitted)
    def _chosen(self, event: Input.Submitted) -> None:
        event.stop()
        if event.value.isdecimal():
            self.post_message(self.Chosen(int(event.value)))
        self.remove()

    def on_key(self, event: events.Key) -> None:
        """Esc drops it."""
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.remove()


class _FilmSource:
    """What the dashboard holds in a server's place: it brings nothing, and passes on which request is looked at."""

    def __init__(self, watch_request: Callable[[str | None], None]) -> None:
        self.watch_request = watch_request

    async def observations(self) -> AsyncIterator[Observation]:
        """None ever comes."""
        nothing: tuple[Observation, ...] = ()
        for observation in nothing:
            yield observation

    def watch_configuration(self, wanted: bool) -> None:
        """A film has none."""


EVENTS = "that retracted, restored, aborted or refused something"

OWN_KEYS: tuple[Binding, ...] = (
    Binding("right", "step(1)", "On", key_display="→", tooltip="one round on"),
    Binding("left", "step(-1)", "Back", key_display="←", tooltip="one round back"),
    Binding("n", "event(True)", "Next event", tooltip=f"the next round {EVENTS}"),
    Binding("N", "event(False)", "Event before", show=False, tooltip=f"the last round before {EVENTS}"),
    Binding("space", "play", "Play", key_display="Space", tooltip="one round after another, and stop"),
    Binding("g", "ask_round", "Go to", tooltip="type the number of a round"),
    Binding("pagedown", f"step({LEAP})", f"{LEAP} on", key_display="PgDn", show=False, tooltip=f"{LEAP} rounds on"),
    Binding("pageup", f"step(-{LEAP})", f"{LEAP} back", key_display="PgUp", show=False, tooltip=f"{LEAP} rounds back"),
    Binding("home", "first", "First", key_display="Home", show=False, tooltip="the first round"),
    Binding("end", "last", "Last", key_display="End", show=False, tooltip="the last round"),
    Binding(
        "G", "group", "Group", show=False, tooltip="show the next cache group by itself, after the last all of them"
    ),
)
MEANINGLESS = ("pause", "show('configuration')")
"""Actions of the dashboard that ask for what a film does not have."""


def with_own_keys(others: Sequence[BindingType]) -> list[BindingType]:
    """The film's keys, then those of the dashboard that are not taken and mean something."""
    taken = {binding.key for binding in OWN_KEYS}
    kept = [
        binding
        for binding in others
        if isinstance(binding, Binding) and binding.key not in taken and binding.action not in MEANINGLESS
    ]
    return [*OWN_KEYS, *kept]


class WatchScreen(DashboardScreen, inherit_bindings=False):
    """The dashboard's screen over a film.

    Args:
        film: what is looked at.
        start: the frame to begin with.
        interval: seconds between frames while it plays.
        theme: see DashboardScreen.
    """

    BINDINGS: ClassVar[list[BindingType]] = with_own_keys(DashboardScreen.BINDINGS)

    def __init__(self, film: Film, *, start: int, interval: float, theme: ThemeName) -> None:
        source = _FilmSource(self._look_up)
        super().__init__(source, film.title, interval=interval, replaying=True, theme=theme)
        self._film = film
        self._view: View | None = None
        self._target = start
        self._errand: Errand = self._to_target
        self._asked = asyncio.Event()
        self._request: str | None = None
        self._playing = False
        self._doing = ""
        self._gone = False
        self._thread = ThreadPoolExecutor(1, "film")
        self._bar = PlaceBar()

    @classmethod
    def all_bindings(cls) -> list[BindingType]:
        """The keys, in the order of the help."""
        return list(cls.BINDINGS)

    def compose(self) -> ComposeResult:
        """The place between what every dashboard has."""
        *above, footer = super().compose()
        yield from above
        yield self._bar
        yield footer

    def on_unmount(self) -> None:
        """Lets go of the thread; nobody waits for what it is at."""
        self._gone = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def place(self) -> Place:
        """What the bar says."""
        number, decided = (self._view.number, self._view.decided) if self._view is not None else (0, "")
        return Place(number, self._film.length, decided, self._doing, self._film.warning, self._playing)

    async def _poll(self) -> None:
        """Runs errands, one after another, in the film's thread; while it plays, time is one."""
        self._asked.set()
        while True:
            await self._next_errand()
            self._asked.clear()
            errand = self._errand
            self._doing = "going there"
            found = await self._in_thread(errand)
            if isinstance(found, View):
                self._show(found)
                await self._tell_request()
            else:
                self.notify(found)
            if not self._asked.is_set():
                self._target = self._view.number if self._view is not None else self._target
            self._doing = ""
            self._draw()

    async def _next_errand(self) -> None:
        if self._playing and self._target < self._film.length:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self.controls.interval)
            if self._asked.is_set() or not self._playing:
                return
            self._target += 1
            self._errand = self._to_target
            return
        self._playing = False
        self._draw()
        await self._asked.wait()

    async def _in_thread(self, errand: Errand) -> View | str:
        return await asyncio.get_running_loop().run_in_executor(self._thread, errand)

    def _to_target(self) -> View | str:
        return look(self._film, self._view, self._target, self._progress)

    def _to_event(self, forward: bool) -> View | str:
        here = self._view.number if self._view is not None else self._target
        there = self._film.next_event(here, forward=forward, progress=self._progress)
        if there is None:
            return f"nothing was retracted, restored, aborted or refused {'after' if forward else 'before'} this round"
        return look(self._film, self._view, there, self._progress)

    def _progress(self, done: int, target: int) -> None:
        """Called in the film's thread; the screen is drawn anew twice a second anyway."""
        if self._gone:
            raise CancelledError
        self._doing = f"going to round {target:,}: {done:,} made again"

    def _show(self, view: View) -> None:
        self._view, self.latest = view, view.picture
        snapshot = view.picture.snapshot
        self._recorded_time = snapshot.time if snapshot is not None and snapshot.time is not None else 0.0
        self._draw()

    async def _tell_request(self) -> None:
        """Looks the request up that is on the screen, once there is time for it."""
        view, request = self._view, self._request
        if view is not None and request is not None and not self._asked.is_set():
            self._show(
                cast(View, await self._in_thread(partial(with_detail, self._film, view, request, self._progress)))
            )

    def _look_up(self, request: str | None) -> None:
        if request != self._request:
            self._request = request
            if request is not None:
                self._ask(self._to_target)

    def _draw(self) -> None:
        super()._draw()
        self._bar.show([render_place(self.place, self._bar.size.width)], self.controls.theme)

    def _ask(self, errand: Errand) -> None:
        self._errand = errand
        self._asked.set()

    def action_step(self, rounds: int) -> None:
        """Goes so many rounds on, or back."""
        self._playing = False
        self._target = min(max(self._target + rounds, 1), self._film.length)
        self._ask(self._to_target)

    def action_first(self) -> None:
        """Goes to the first round."""
        self.action_step(-self._film.length)

    def action_last(self) -> None:
        """Goes to the last round."""
        self.action_step(self._film.length)

    def action_play(self) -> None:
        """One round after another, or stops."""
        self._playing = not self._playing
        self._ask(self._to_target)

    def action_event(self, forward: bool) -> None:
        """Goes to the nearest round that retracted, restored, aborted or refused something."""
        self._playing = False
        self._ask(partial(self._to_event, forward))

    def action_ask_round(self) -> None:
        """Asks for the number of a round."""
        self._playing = False
        if not self.query(RoundLine):
            line = RoundLine(placeholder=f"a round, 1 to {self._film.length:,}; Enter goes there", type="integer")
            self.mount(line, before=self._bar)
            line.focus()

    @on(RoundLine.Chosen)
    def _round_chosen(self, chosen: RoundLine.Chosen) -> None:
        self.action_step(chosen.number - self._target)


class Watch(ThemedApp):
    """The application around a film; what it takes is its screen's."""

    TITLE = "tokenspeed replay --watch"

    def __init__(self, film: Film, *, start: int = 1, interval: float = 0.5, theme: ThemeName = "dark") -> None:
        super().__init__(theme)
        self.dashboard = WatchScreen(film, start=start, interval=interval, theme=self.scene_theme)

    def get_default_screen(self) -> Screen[None]:
        """The film's screen is the only one."""
        return self.dashboard


def watch(film: Film, start: int) -> int:
    """Shows the film; returns the exit status. Raises ValueError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ValueError("--watch needs a terminal; --dump N prints the rounds around round N anywhere")
    app = Watch(film, start=start)
    app.run()
    return app.return_code or 0
