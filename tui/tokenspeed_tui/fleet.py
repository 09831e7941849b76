"""Several servers on one screen, a row each; a server's own screen opens above it and closes again."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer

from tokenspeed_tui.app import ThemedApp
from tokenspeed_tui.controls import Controls
from tokenspeed_tui.dashboard import AGE_REFRESH_S, DashboardScreen
from tokenspeed_tui.keys import key_words
from tokenspeed_tui.local import Found
from tokenspeed_tui.observation import Source
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render.fleet import Member, render_fleet
from tokenspeed_tui.render.help import help_panel
from tokenspeed_tui.render.panel import FRAME_ROWS, FRAME_WIDTH, draw
from tokenspeed_tui.scene import Scene
from tokenspeed_tui.themes import ThemeName, other_theme

LEAST_INTERVAL_S = 1.0
"""Between looks at one server, while all are on the screen."""

FIND_S = 5.0
"""Between looks for servers that came or went."""

Find = Callable[[], list[Found]]
"""The servers of this machine; it may take a while, and raises nothing."""


class FleetScreen(Screen[None]):
    """The servers.

    Args:
        urls: those that are always there.
        connect: makes a source of an address.
        interval: seconds between polls of the server that is opened.
        theme: see DashboardScreen.
        find: looks for more, now and again; None looks for none.
    """

    AUTO_FOCUS = ""
    DEFAULT_CSS = "FleetScreen { background: $background; color: $foreground; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "Quit", tooltip="leave"),
        Binding("question_mark", "help", "Help", key_display="?", tooltip="this page"),
        Binding("enter", "open", "Open", key_display="Enter", tooltip="the selected server's own screen"),
        Binding("escape", "back", "Back", key_display="Esc", show=False, tooltip="from a server, or from this page"),
        Binding("up,k", "select(-1)", "Up", key_display="↑ k", show=False, tooltip="the server above"),
        Binding("down,j", "select(1)", "Down", key_display="↓ j", show=False, tooltip="the server below"),
        Binding("t", "theme", "Theme", tooltip="change between dark and light"),
    ]

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], Source],
        *,
        interval: float,
        theme: ThemeName,
        find: Find | None = None,
    ) -> None:
        super().__init__()
        self._connect = connect
        self._find = find
        self._always = frozenset(urls)
        self.members = {url: Member(Picture(url=url), "") for url in urls}
        self.selected = next(iter(urls), None)
        self.helping = False
        self.scene = Scene()
        self.controls = Controls(interval=interval, theme=theme, keys=key_words(self.BINDINGS))

    def compose(self) -> ComposeResult:
        """The scene above the list of keys."""
        yield self.scene
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Begins to look at each server, and for more."""
        self._draw()
        self.set_interval(AGE_REFRESH_S, self._draw)
        for url in self.members:
            self.run_worker(self._poll(url), name=url)
        if self._find is not None:
            self.run_worker(self._keep_finding(self._find), name="find")

    def on_resize(self) -> None:
        """Draws for the new size once the scene has it."""
        self.call_after_refresh(self._draw)

    def on_screen_resume(self) -> None:
        """A server's screen was closed; its theme stays."""
        theme = self.app.theme.removeprefix("tokenspeed-")
        if theme in ("dark", "light"):
            self.controls = msgspec.structs.replace(self.controls, theme=theme)
        self.call_after_refresh(self._draw)

    async def _poll(self, url: str) -> None:
        """Looks at one server as long as it is of the fleet; while another's screen is open, too."""
        source = self._connect(url)
        async for observation in source.observations():
            member = self.members.get(url)
            if member is None:
                return
            self.members[url] = member._replace(picture=advance(member.picture, observation))
            self._draw()
            await self.pause()

    async def pause(self) -> None:
        """Waits between two looks at a server."""
        await asyncio.sleep(max(LEAST_INTERVAL_S, self.controls.interval))

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    async def _keep_finding(self, find: Find) -> None:
        while True:
            self._meet(await asyncio.to_thread(find))
            await asyncio.sleep(FIND_S)

    def _meet(self, found: list[Found]) -> None:
        """Takes new servers in, and lets those go that nobody named, that are not found and that do not answer."""
        here = {one.url: one for one in found}
        for url, one in here.items():
            if url in self.members:
                self.members[url] = self.members[url]._replace(where=one.where)
            else:
                self.members[url] = Member(Picture(url=url), one.where)
                self.run_worker(self._poll(url), name=url)
        for url, member in list(self.members.items()):
            if url not in here and url not in self._always and member.picture.error:
                del self.members[url]
        if self.selected not in self.members:
            self.selected = next(iter(self.members), None)
        self._draw()

    def _draw(self) -> None:
        width, height = self.scene.size
        if self.helping:
            lines = draw(help_panel(self.controls, width - FRAME_WIDTH, height - FRAME_ROWS), width, height, frame=True)
        else:
            members = list(self.members.values())
            lines = render_fleet(members, self.selected, self.controls, self.now(), width, height)
        self.scene.show(lines, self.controls.theme)

    def action_select(self, step: int) -> None:
        """Moves the selection; stays at either end."""
        urls = list(self.members)
        if self.selected is not None:
            self.selected = urls[min(max(urls.index(self.selected) + step, 0), len(urls) - 1)]
        self._draw()

    def action_open(self) -> None:
        """Opens the screen of the selected server, which looks at it by itself."""
        if self.selected is not None and not self.helping:
            source, chosen = self._connect(self.selected), self.controls
            screen = DashboardScreen(source, self.selected, interval=chosen.interval, theme=chosen.theme)
            self.app.push_screen(screen)

    def action_help(self) -> None:
        """Explains the keys; the same key again goes back."""
        self.helping = not self.helping
        self._draw()

    def action_back(self) -> None:
        """From the keys to the servers."""
        self.helping = False
        self._draw()

    def action_theme(self) -> None:
        """Changes between dark and light."""
        self.controls = msgspec.structs.replace(self.controls, theme=other_theme(self.controls.theme))
        if self.controls.theme in ("dark", "light"):
            self.app.theme = f"tokenspeed-{self.controls.theme}"
        self._draw()

    def on_click(self, event: events.Click) -> None:
        """A click on a row selects it, on the selected row opens it."""
        url = event.style.meta.get("server")
        if url is not None and url == self.selected:
            self.action_open()
        elif url in self.members:
            self.selected = url
            self._draw()


class Fleet(ThemedApp):
    """The application around the servers; what it takes is their screen's."""

    TITLE = "tokenspeed top"

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], Source],
        *,
        interval: float,
        theme: ThemeName = "dark",
        find: Find | None = None,
    ) -> None:
        super().__init__(theme)
        self.fleet = FleetScreen(urls, connect, interval=interval, theme=self.scene_theme, find=find)

    def get_default_screen(self) -> Screen[None]:
        """The servers are the first screen there is."""
        return self.fleet
