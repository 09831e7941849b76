"""The screen of one server: a scene, the list of keys, and a worker that polls.

The worker awaits the source and hands over immutable pictures; drawing only ever reads the last one, so that nothing
on the screen waits for the network.
"""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer

from tokenspeed_tui.controls import (
    PAGES,
    Controls,
    chosen_request,
    listed_requests,
    moved_selection,
    next_group,
    next_sort,
    stepped_interval,
    stepped_window,
)
from tokenspeed_tui.keys import key_words
from tokenspeed_tui.observation import Observation, Source
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.recording import Recorder
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.render.screen import scrolled
from tokenspeed_tui.scene import Scene
from tokenspeed_tui.themes import ThemeName, other_theme

if TYPE_CHECKING:
    from textual.widgets import Input

AGE_REFRESH_S = 1.0
"""How often the screen is drawn anew between polls, so that the age of the data counts up."""
WHEEL_STEP = 3
SCROLLED_PAGES = ("configuration", "events", "help")
LIST_PAGES = ("main", "requests")


class DashboardScreen(Screen[None]):
    """One server, or one recording.

    Args:
        source: where observations come from.
        url: of the server, shown before the first answer.
        interval: seconds between polls.
        recorder: gets each observation.
        replaying: whether the source is a recording; then time is the recording's.
        theme: dark, light, or plain where colour is off.
    """

    AUTO_FOCUS = ""
    DEFAULT_CSS = "DashboardScreen { background: $background; color: $foreground; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "Quit", tooltip="leave"),
        Binding("question_mark", "show('help')", "Help", key_display="?", tooltip="this page"),
        Binding("p", "pause", "Pause", tooltip="hold the picture; polling and recording go on behind it"),
        Binding(
            "slash",
            "filter",
            "Filter",
            key_display="/",
            tooltip="list only requests whose id, state or reason holds what is typed",
        ),
        Binding("s", "sort", "Sort", tooltip="order the requests by the next key"),
        Binding(
            "g", "group", "Group", show=False, tooltip="show the next cache group by itself, after the last all of them"
        ),
        Binding("t", "theme", "Theme", show=False, tooltip="change between dark and light"),
        Binding("e", "show('events')", "Events", tooltip="the advisor's findings and the event log"),
        Binding("c", "show('configuration')", "Config", tooltip="every setting with its source, memory, kernels"),
        Binding(
            "enter", "details", "Open", key_display="Enter", tooltip="the selected request: why it waits, its life"
        ),
        Binding("escape", "back", "Back", key_display="Esc", tooltip="drop the filter, or go back"),
        Binding("1", "show('main')", "Main", show=False, tooltip="the overview"),
        Binding("2", "show('requests')", "Requests", show=False, tooltip="the requests, over the whole screen"),
        Binding(
            "3",
            "show('cache')",
            "Cache",
            show=False,
            tooltip="the KV cache: every group and tier with its map, hits by tier, evictions",
        ),
        Binding(
            "4", "show('rates')", "Rates", show=False, tooltip="rates, latencies and the split of a step as charts"
        ),
        Binding("plus,equals_sign", "rate(True)", "Faster", key_display="+", show=False, tooltip="poll faster"),
        Binding("minus", "rate(False)", "Slower", key_display="-", show=False, tooltip="poll slower"),
        Binding(
            "left_square_bracket",
            "zoom(False)",
            "Zoom in",
            key_display="[",
            show=False,
            tooltip="bars over a shorter time (30 s, 1 m, 5 m, 15 m)",
        ),
        Binding(
            "right_square_bracket",
            "zoom(True)",
            "Zoom out",
            key_display="]",
            show=False,
            tooltip="bars over a longer time",
        ),
        Binding("up,k", "select(-1)", "Up", key_display="↑ k", show=False, tooltip="the request above, or a line up"),
        Binding(
            "down,j", "select(1)", "Down", key_display="↓ j", show=False, tooltip="the request below, or a line down"
        ),
        Binding("pageup", "select(-10)", "Ten up", key_display="PgUp", show=False, tooltip="ten up"),
        Binding("pagedown", "select(10)", "Ten down", key_display="PgDn", show=False, tooltip="ten down"),
    ]

    def __init__(
        self,
        source: Source,
        url: str,
        *,
        interval: float,
        recorder: Recorder | None = None,
        replaying: bool = False,
        theme: ThemeName = "dark",
    ) -> None:
        super().__init__()
        self._source = source
        # Held, not looked up: a poll that is through while the application closes still has where to draw.
        self.scene = Scene()
        self._recorder = recorder
        self.latest = Picture(url=url)
        self._frozen: Picture | None = None
        self._recorded_time = 0.0
        self._hurry = asyncio.Event()
        self.controls = Controls(
            interval=interval, replaying=replaying, theme=theme, keys=key_words(type(self).all_bindings())
        )

    @classmethod
    def all_bindings(cls) -> list[BindingType]:
        """The keys of this screen and of the ones it extends, in the order of the help."""
        return [*DashboardScreen.BINDINGS, *(cls.BINDINGS if cls is not DashboardScreen else ())]

    @property
    def picture(self) -> Picture:
        """The picture on the screen: the latest, or the one that pause holds."""
        return self._frozen or self.latest

    def compose(self) -> ComposeResult:
        """The scene above the list of keys."""
        yield self.scene
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Paints the skeleton, then starts to poll."""
        # The advisor names present values, so the configuration is always watched: a small answer now and then.
        self._source.watch_configuration(True)
        self._draw()
        self.set_interval(AGE_REFRESH_S, self._draw)
        self.run_worker(self._poll(), name="poll", exit_on_error=True)

    def on_resize(self) -> None:
        """Draws for the new size once the scene has it."""
        self.call_after_refresh(self._draw)

    async def _poll(self) -> None:
        async for observation in self._source.observations():
            self._record(observation)
            self.latest = advance(self.latest, observation)
            self._complete_frozen()
            self._recorded_time = observation.time
            self._draw()
            await self._pause_between_polls()
        self.change(ended=True)

    def _complete_frozen(self) -> None:
        """Gives a picture that pause holds what is asked for only when its page opens."""
        if self._frozen is None:
            return
        latest = self.latest
        self._frozen = msgspec.structs.replace(self._frozen, detail=latest.detail, detail_error=latest.detail_error)
        if self._frozen.configuration is None:
            self._frozen = msgspec.structs.replace(
                self._frozen,
                configuration=latest.configuration,
                configuration_error=latest.configuration_error,
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

    def hurry(self) -> None:
        """Looks at once, where that is a server: a key that steps through a recording is another one."""
        if not self.controls.replaying:
            self._hurry.set()

    def _draw(self) -> None:
        width, height = self.scene.size
        lines = render_screen(self.picture, self.controls, self.now(), width, height)
        self.scene.show(lines, self.controls.theme)

    def now(self) -> float:
        """Seconds since the epoch; in a replay by the recording's clock."""
        return self._recorded_time if self.controls.replaying else time.time()

    def change(self, **changes: object) -> None:
        """Changes what was chosen, and draws."""
        before, self.controls = self.controls, msgspec.structs.replace(self.controls, **changes)
        if (self.controls.shown, self.controls.selected) != (before.shown, before.selected):
            self._watch_request()
        if self.controls.shown != before.shown:
            self.refresh_bindings()
        self._draw()

    def _watch_request(self) -> None:
        """The detail of a request is asked for while it is on the screen."""
        wanted: str | None = None
        if self.controls.shown == "detail" and self.controls.selected is not None:
            request = chosen_request(self.picture, self.controls.selected)
            wanted = (request.request_id if request is not None else None) or str(self.controls.selected)
        self._source.watch_request(wanted)
        if wanted is not None:
            self.hurry()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Details are reached from where requests are listed, and the way back from elsewhere: 80 columns name no key
        more."""
        if action == "details":
            return self.controls.shown in LIST_PAGES
        if action == "back":
            return self.controls.shown != "main" or bool(self.controls.pattern) or len(self.app.screen_stack) > 1
        return super().check_action(action, parameters)

    def action_show(self, page: str) -> None:
        """Shows a page, from its top; the same key again goes back to the overview."""
        again = self.controls.shown == page and page not in PAGES.values()
        self.change(shown="main" if again else page, scroll=0)

    def action_pause(self) -> None:
        """Holds the picture; polling (and recording) goes on behind it."""
        self._frozen = None if self.controls.paused else self.latest
        self.change(paused=not self.controls.paused)

    def action_sort(self) -> None:
        """Orders the requests by the next key."""
        self.change(sort=next_sort(self.controls.sort))

    def action_group(self) -> None:
        """Shows the next cache group by itself."""
        self.change(group=next_group(self.picture, self.controls.group))

    def action_theme(self) -> None:
        """Changes between dark and light."""
        self.change(theme=other_theme(self.controls.theme))
        self.app.theme = f"tokenspeed-{self.controls.theme}"

    def action_zoom(self, wider: bool) -> None:
        """Lets the bars span another time."""
        self.change(window=stepped_window(self.controls.window, wider))

    def action_rate(self, faster: bool) -> None:
        """Polls faster or slower."""
        self.change(interval=stepped_interval(self.controls.interval, faster))
        self._hurry.set()

    def action_select(self, step: int) -> None:
        """Moves the selection, or scrolls the page."""
        if self.controls.shown in SCROLLED_PAGES:
            self.change(scroll=scrolled(self.picture, self.controls, self.now(), *self.scene.size, step))
        else:
            self.change(selected=moved_selection(self.picture, self.controls, step))

    def action_details(self) -> None:
        """Shows the selected request by itself."""
        if listed_requests(self.picture, self.controls):
            selected = moved_selection(self.picture, self.controls, 0)
            self.change(selected=selected, shown="detail", before=self.controls.shown)

    def action_back(self) -> None:
        """Goes back: from a request to where it was chosen, from a page to the overview; there it drops the filter, and
        leaves to the screen below, if there is one."""
        if self.controls.shown == "detail":
            self.change(shown=self.controls.before)
        elif self.controls.pattern and self.controls.shown in LIST_PAGES:
            self.change(pattern="")
            self.refresh_bindings()
        elif self.controls.shown != "main":
            self.change(shown="main", scroll=0)
        elif len(self.app.screen_stack) > 1:
            self.app.pop_screen()

    def action_filter(self) -> None:
        """Opens the line for a filter, where requests are listed."""
        from tokenspeed_tui.filter_line import FilterLine

        if self.controls.shown not in LIST_PAGES:
            self.change(shown="requests")
        line = FilterLine(self.controls.pattern)
        self.mount(line, after=self.scene)
        line.focus()

    def on_input_changed(self, event: "Input.Changed") -> None:
        """What is typed works at once."""
        self.change(pattern=event.value)

    async def on_input_submitted(self, event: "Input.Submitted") -> None:
        """Keeps the filter."""
        await self._close(event.input)

    async def on_filter_line_dropped(self) -> None:
        """Drops the filter."""
        self.change(pattern="")
        await self._close(self.query_one("FilterLine"))

    async def _close(self, line: Widget) -> None:
        await line.remove()
        self.refresh_bindings()

    def on_click(self, event: events.Click) -> None:
        """A click on a row selects it, on the selected row opens it; on a panel's name or a page's tab shows that."""
        page, handle = event.style.meta.get("page"), event.style.meta.get("request")
        if page is not None:
            self.change(shown=page, scroll=0)
        elif handle is not None and handle == self.controls.selected:
            self.action_details()
        elif handle is not None:
            self.change(selected=handle)

    def on_mouse_scroll_down(self) -> None:
        """The wheel moves like the arrows, a few lines at a time."""
        self.action_select(WHEEL_STEP)

    def on_mouse_scroll_up(self) -> None:
        """The wheel moves like the arrows, a few lines at a time."""
        self.action_select(-WHEEL_STEP)
