"""The themes: what each style name of the render functions looks like.

Render functions name styles by what they mean ("held", "bad", "flow"); a theme turns the names into colours. These are
after Okabe and Ito, who chose them to be told apart with any kind of colour vision; letters and words say the same.
"""

from typing import Literal

from rich.theme import Theme

ThemeName = Literal["dark", "light", "terminal", "plain"]
"""``terminal`` keeps to the terminal's own sixteen colours (for ``--once``), ``plain`` has none (NO_COLOR)."""

BACKGROUNDS: dict[ThemeName, str] = {"dark": "#11151a", "light": "#fbfaf6"}
FOREGROUNDS: dict[ThemeName, str] = {"dark": "#d5dbe1", "light": "#1f2328"}

_PLAIN = {
    "title": "bold",
    "rule": "dim",
    "muted": "dim",
    "key": "bold",
    "accent": "bold",
    "good": "none",
    "warn": "bold",
    "bad": "bold reverse",
    "selected": "reverse",
    "count": "bold",
    "idle": "dim",
    "flow": "bold",
    "held": "bold",
    "cached": "none",
    "pinned": "bold",
    "free": "dim",
    "elsewhere": "dim",
    "plan": "none",
    "device": "bold",
    "commit": "none",
    "bubble": "dim",
    "prefill": "none",
    "decode": "bold",
}

_TERMINAL = _PLAIN | {
    "accent": "bold cyan",
    "good": "green",
    "warn": "bold yellow",
    "bad": "bold red",
    "flow": "bold green",
    "held": "bold cyan",
    "cached": "yellow",
    "pinned": "bold magenta",
    "plan": "cyan",
    "device": "green",
    "commit": "yellow",
    "bubble": "red",
    "prefill": "cyan",
    "decode": "green",
}

_DARK = {
    "title": "bold #e8edf2",
    "rule": "#5a6673",
    "muted": "#8b96a3",
    "key": "bold #56b4e9",
    "accent": "bold #56b4e9",
    "good": "#3fc79a",
    "warn": "bold #f0e442",
    "bad": "bold #ff8a5c",
    "selected": "bold #11151a on #56b4e9",
    "count": "bold #ffffff",
    "idle": "#65717e",
    "flow": "bold #f0e442",
    "held": "#56b4e9",
    "cached": "#e69f00",
    "pinned": "bold #e08fbf",
    "free": "#65717e",
    "elsewhere": "#65717e",
    "plan": "#56b4e9",
    "device": "#3fc79a",
    "commit": "#e69f00",
    "bubble": "#ff8a5c",
    "prefill": "#56b4e9",
    "decode": "#3fc79a",
}

_LIGHT = {
    "title": "bold #14181d",
    "rule": "#7c858f",
    "muted": "#5f6873",
    "key": "bold #00609a",
    "accent": "bold #00609a",
    "good": "#006b4c",
    "warn": "bold #7a5200",
    "bad": "bold #ad3500",
    "selected": "bold #fbfaf6 on #00609a",
    "count": "bold #000000",
    "idle": "#7c858f",
    "flow": "bold #ad3500",
    "held": "#00609a",
    "cached": "#8a5a00",
    "pinned": "bold #97306a",
    "free": "#7c858f",
    "elsewhere": "#7c858f",
    "plan": "#00609a",
    "device": "#006b4c",
    "commit": "#8a5a00",
    "bubble": "#ad3500",
    "prefill": "#00609a",
    "decode": "#006b4c",
}

THEMES: dict[ThemeName, Theme] = {
    "dark": Theme(_DARK),
    "light": Theme(_LIGHT),
    "terminal": Theme(_TERMINAL),
    "plain": Theme(_PLAIN),
}


def other_theme(name: ThemeName) -> ThemeName:
    """What the theme key changes to: dark and light are each other's; without colour there is nothing to change."""
    others: dict[ThemeName, ThemeName] = {"dark": "light", "light": "dark"}
    return others.get(name, name)
