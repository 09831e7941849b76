"""The help: every key, from the bindings, and what the signs mean."""

import textwrap

from rich.text import Text

from tokenspeed_tui.controls import SORT_KEYS, Controls, KeyWords
from tokenspeed_tui.render import cache
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.detail import LETTERS
from tokenspeed_tui.render.panel import Panel

KEY_WIDTH = 10


def help_panel(controls: Controls, width: int, rows: int) -> Panel:
    """Keys, then the signs; what does not fit scrolls by."""
    lines = _lines(controls, width)
    first = min(controls.scroll, last_help_scroll(controls, width, rows))
    below = max(0, len(lines) - first - rows)
    notes = ["Esc goes back", f"{first} lines above, {below} below" if first or below else ""]
    return Panel("Keys", notes, lines[first : first + rows])


def last_help_scroll(controls: Controls, width: int, rows: int) -> int:
    """The largest scroll that still fills ``rows`` lines."""
    return max(0, len(_lines(controls, width)) - rows)


def _lines(controls: Controls, width: int) -> list[Text]:
    letters = ", ".join(f"{letter} {state}" for state, (letter, _) in LETTERS.items())
    signs = [
        f"{t.DASH} is unknown or does not exist here; it never stands for 0.",
        f"KV: {cache.LEGEND}.",
        "Step: P plan, D device, C commit, B bubble (the device had nothing to do).",
        f"A life: {letters}.",
        f"Sort: {', '.join(SORT_KEYS)}.",
        f"Polling every {controls.interval:g} s; bars span {t.duration(controls.window)}.",
        "The mouse selects a row, opens it with a second click, opens the panel whose name it clicks, and scrolls.",
    ]
    keys = [_key_line(key) for key in controls.keys]
    return keys + [t.line((part, t.MUTED_STYLE)) for sign in signs for part in textwrap.wrap(sign, max(width, 1))]


def _key_line(key: KeyWords) -> Text:
    return t.line((t.fitted(key.key, KEY_WIDTH), "key"), key.does)
