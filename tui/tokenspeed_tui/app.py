"""The live application: themes, and the screen of one server as its first."""

import os
from typing import TYPE_CHECKING, Any, Literal

from textual.app import App
from textual.screen import Screen
from textual.theme import Theme

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.observation import Source
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.recording import Recorder
from tokenspeed_tui.themes import BACKGROUNDS, FOREGROUNDS, ThemeName

if TYPE_CHECKING:
    from tokenspeed_tui.admin import Administration


def app_theme(name: Literal["dark", "light"], accent: str, error: str) -> Theme:
    """What surrounds the scene: the list of keys, dialogs, the filter's line."""
    ground = BACKGROUNDS[name]
    return Theme(
        name=f"tokenspeed-{name}",
        primary=accent,
        accent=accent,
        error=error,
        foreground=FOREGROUNDS[name],
        background=ground,
        surface=ground,
        panel=ground,
        dark=name == "dark",
        variables={"footer-background": ground, "footer-key-background": ground},
    )


APP_THEMES = (app_theme("dark", "#56b4e9", "#ff8a5c"), app_theme("light", "#00609a", "#ad3500"))


class ThemedApp(App[None]):
    """What all applications of the dashboard have in common; the first screen is theirs to name.

    Args:
        theme: dark or light; NO_COLOR in the environment goes without any colour.
    """

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, theme: ThemeName) -> None:
        colourless = bool(os.environ.get("NO_COLOR"))
        # By itself Textual turns NO_COLOR into shades of grey; on the terminal's own palette it leaves all colour out.
        super().__init__(ansi_color=True if colourless else None)
        for each in APP_THEMES:
            self.register_theme(each)
        if not colourless:
            self.theme = f"tokenspeed-{theme}"
        self.scene_theme: ThemeName = "plain" if colourless else theme


class Dashboard(ThemedApp):
    """The application around one server's screen; what it takes is that screen's.

    Args:
        source: a server or a recording.
        url: of the server, shown before the first answer.
        interval: seconds between polls.
        recorder: gets each observation.
        replaying: whether the source is a recording; then time is the recording's.
        theme: see ThemedApp.
        administration: where given, keys that change the engine are bound.
    """

    TITLE = "tokenspeed top"

    def __init__(
        self,
        source: Source,
        url: str,
        *,
        interval: float,
        recorder: Recorder | None = None,
        replaying: bool = False,
        theme: ThemeName = "dark",
        administration: "Administration | None" = None,
    ) -> None:
        super().__init__(theme)
        options: dict[str, Any] = {"interval": interval, "recorder": recorder, "replaying": replaying}
        options["theme"] = self.scene_theme
        if administration is None:
            self.dashboard = DashboardScreen(source, url, **options)
        else:
            from tokenspeed_tui.operator import OperatorScreen

            self.dashboard = OperatorScreen(source, url, administration=administration, **options)

    def get_default_screen(self) -> Screen[None]:
        """The server's screen is the first one there is."""
        return self.dashboard

    @property
    def picture(self) -> Picture:
        """The picture on the server's screen."""
        return self.dashboard.picture

    @property
    def controls(self) -> Controls:
        """What was chosen there."""
        return self.dashboard.controls
