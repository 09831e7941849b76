"""The one widget of the dashboard: it shows rendered lines, and redraws only those that changed."""

from rich.console import Console
from rich.text import Text
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tokenspeed_tui.themes import THEMES, ThemeName


class Scene(Widget):
    """Lines of text whose style names a theme resolves."""

    DEFAULT_CSS = "Scene { height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self.lines: tuple[Text, ...] = ()
        self._theme_name: ThemeName = "dark"
        self._styles = _looked_up("dark")

    def show(self, lines: list[Text], theme: ThemeName) -> None:
        """Shows other lines; where they are as many as before and of the same theme, only what changed is drawn."""
        before, self.lines = self.lines, tuple(lines)
        if theme != self._theme_name or len(before) != len(lines):
            self._theme_name, self._styles = theme, _looked_up(theme)
            self.refresh()
            return
        width = self.size.width
        changed = [
            Region(0, row, width, 1)
            for row, (old, new) in enumerate(zip(before, lines, strict=True))
            if old.plain != new.plain or old.spans != new.spans
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """One line, styled."""
        width = self.size.width
        if y >= len(self.lines):
            return Strip.blank(width, self.rich_style)
        segments = self.lines[y].render(self._styles)
        return Strip(segments).apply_style(self.rich_style).adjust_cell_length(width, self.rich_style)


def _looked_up(theme: ThemeName) -> Console:
    """A console that only looks styles up; it never prints."""
    return Console(theme=THEMES[theme], color_system="truecolor", force_terminal=True)
