"""The live dashboard: one widget that shows rendered lines, keys, and a worker that polls.

The worker awaits the source and hands over immutable pictures; drawing only ever reads the last one, so that nothing
on the screen waits for the network.
"""

import asyncio
import contextlib
import os
import time
from typing import ClassVar

import msgspec
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Footer

from tokenspeed_tui.controls import Controls, moved_selection, next_sort, ordered_requests, stepped_interval
from tokenspeed_tui.observation import Observation, Source
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.recording import Recorder
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.render.screen import scrolled

AGE_REFRESH_S = 0.5
"""How often the screen is drawn anew between polls, so that the age of the data counts up."""


class Scene(Widget):
    """The picture as lines; everything it shows comes from render_screen."""

    DEFAULT_CSS = "Scene { height: 1fr; }"

    lines: reactive[tuple[Text, ...]] = reactive(())

    def render(self) -> Text:
        """The lines as one text."""
        return Text("\n", no_wrap=True).join(self.lines)


class Dashboard(App[None]):
    """The application.

    Args:
        source: a server or a recording.
        url: of the server, shown before the first answer.
        interval: seconds between polls.
        recorder: gets each observation.
        replaying: whether the source is a recording; then time is the recording's.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "tokenspeed top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort"),
        Binding("enter", "details", "Details", key_display="Enter"),
        Binding("c", "configuration", "Configuration"),
        Binding("escape", "main_screen", "Back", key_display="Esc"),
        Binding("plus,equals_sign", "rate(True)", "Faster", key_display="+"),
        Binding("minus", "rate(False)", "Slower", key_display="-"),
        Binding("up", "select(-1)", "Up", key_display="↑", show=False),
        Binding("down", "select(1)", "Down", key_display="↓", show=False),
        Binding("pageup", "select(-10)", "Ten up", key_display="PgUp", show=False),
        Binding("pagedown", "select(10)", "Ten down", key_display="PgDn", show=False),
    ]

    def __init__(
        self,
        source: Source,
        url: str,
        *,
        interval: float,
        recorder: Recorder | None = None,
        replaying: bool = False,
    ) -> None:
        # By itself Textual turns NO_COLOR into shades of grey; on the terminal's own palette it leaves all colour out.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self._source = source
        # Held, not looked up: a poll that is through while the application closes still has where to draw.
        self._scene = Scene()
        self._recorder = recorder
        self._latest = Picture(url=url)
        self._frozen: Picture | None = None
        self._recorded_time = 0.0
        self._hurry = asyncio.Event()
        self.controls = Controls(interval=interval, replaying=replaying, keys=_keys(self.BINDINGS))

    @property
    def picture(self) -> Picture:
        """The picture on the screen: the latest, or the one that pause holds."""
        return self._frozen or self._latest

    def compose(self) -> ComposeResult:
        """The scene above the list of keys."""
        yield self._scene
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Paints the skeleton, then starts to poll."""
        self._watch_configuration()
        self._draw()
        self.set_interval(AGE_REFRESH_S, self._draw)
        self.run_worker(self._poll(), name="poll", exit_on_error=True)

    def on_resize(self) -> None:
        """Draws for the new size once the scene has it."""
        self.call_after_refresh(self._draw)

    async def _poll(self) -> None:
        async for observation in self._source.observations():
            self._record(observation)
            self._latest = advance(self._latest, observation)
            self._complete_frozen()
            self._recorded_time = observation.time
            self._draw()
            await self._pause_between_polls()
        self._change(ended=True)

    def _complete_frozen(self) -> None:
        """Gives a picture that pause holds the configuration it lacks: that is asked for when its panel opens."""
        if self._frozen is not None and self._frozen.configuration is None:
            self._frozen = msgspec.structs.replace(
                self._frozen,
                configuration=self._latest.configuration,
                configuration_error=self._latest.configuration_error,
            )

    def _record(self, observation: Observation) -> None:
        """Writes an observation down; a disk that takes no more ends the recording, not the dashboard."""
        if self._recorder is None:
            return
        try:
            self._recorder.write(observation)
        except OSError as error:
            self._recorder = None
            self.notify(f"the recording stopped: {error.strerror}", severity="error", timeout=30)

    async def _pause_between_polls(self) -> None:
        """Waits for the interval; who is in a hurry ends the wait, also where it has not begun yet."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self.controls.interval)
        self._hurry.clear()

    def _draw(self) -> None:
        width, height = self._scene.size
        self._scene.lines = tuple(render_screen(self.picture, self.controls, self._now(), width, height))

    def _now(self) -> float:
        return self._recorded_time if self.controls.replaying else time.time()

    def _change(self, **changes: object) -> None:
        before, self.controls = self.controls, msgspec.structs.replace(self.controls, **changes)
        if self.controls.shown != before.shown:
            self._watch_configuration()
            self.refresh_bindings()
        self._draw()

    def _watch_configuration(self) -> None:
        """The configuration is asked for while its panel is open; a recording always has it, for who looks later."""
        self._source.watch_configuration(self._recorder is not None or self.controls.shown == "configuration")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Details are reached from the main screen, and the way back from the others: 80 columns name no key more."""
        if action in ("details", "main_screen"):
            return (self.controls.shown == "main") == (action == "details")
        return super().check_action(action, parameters)

    def action_help(self) -> None:
        """Explains the keys; the same key again goes back."""
        self._change(shown="main" if self.controls.shown == "help" else "help")

    def action_pause(self) -> None:
        """Holds the picture; polling (and recording) goes on behind it."""
        self._frozen = None if self.controls.paused else self._latest
        self._change(paused=not self.controls.paused)

    def action_sort(self) -> None:
        """Orders the requests by the next key."""
        self._change(sort=next_sort(self.controls.sort))

    def action_select(self, step: int) -> None:
        """Moves the selection, or scrolls the configuration."""
        if self.controls.shown == "configuration":
            self._change(scroll=scrolled(self.picture, self.controls, self._now(), *self._scene.size, step))
        else:
            self._change(selected=moved_selection(self.picture, self.controls, step))

    def action_details(self) -> None:
        """Shows the selected request by itself."""
        if ordered_requests(self.picture, self.controls.sort):
            self._change(selected=moved_selection(self.picture, self.controls, 0), shown="detail")

    def action_configuration(self) -> None:
        """Shows the configuration, from its top; the same key again goes back."""
        if self.controls.shown == "configuration":
            self._change(shown="main")
            return
        self._change(shown="configuration", scroll=0)
        if not self.controls.replaying:
            self._hurry.set()

    def action_main_screen(self) -> None:
        """Goes back to the main screen."""
        self._change(shown="main")

    def action_rate(self, faster: bool) -> None:
        """Polls faster or slower."""
        self._change(interval=stepped_interval(self.controls.interval, faster))
        self._hurry.set()


def _keys(bindings: list[BindingType]) -> tuple[tuple[str, str], ...]:
    """The bindings as the help lists them."""
    return tuple(
        (binding.key_display or binding.key, binding.description)
        for binding in bindings
        if isinstance(binding, Binding)
    )
