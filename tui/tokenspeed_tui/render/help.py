"""The help: every key, from the bindings, and what the signs mean."""

import textwrap

from rich.text import Text

from tokenspeed_tui.controls import SORT_KEYS, Controls, KeyWords
from tokenspeed_tui.render import cache
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.detail import LETTERS
from tokenspeed_tui.render.panel import Panel

KEY_WIDTH = 10
TWO_COLUMNS = 110


def help_panel(controls: Controls, width: int) -> Panel:
    """Keys, in two columns where there is room, then the signs."""
    if width >= TWO_COLUMNS:
        half = -(-len(controls.keys) // 2)
        left = [_key_line(key) for key in controls.keys[:half]]
        right = [_key_line(key) for key in controls.keys[half:]]
        lines = t.beside(left, right, width // 2, 0)
    else:
        lines = [_key_line(key) for key in controls.keys]
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
    return Panel("Keys", ["Esc goes back"], [*lines, *_wrapped(signs, width)])


def _key_line(key: KeyWords) -> Text:
    return t.line((t.fitted(key.key, KEY_WIDTH), "key"), key.does)


def _wrapped(sentences: list[str], width: int) -> list[Text]:
    return [t.line((part, t.MUTED_STYLE)) for text in sentences for part in textwrap.wrap(text, max(width, 1))]
