"""Figures and short texts as the screen shows them. What is unknown is a dash, never 0."""

import math

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from tokenspeed_tui.history import Course

DASH = "–"
ELLIPSIS = "…"
TITLE_STYLE = "title"
RULE_STYLE = "rule"
MUTED_STYLE = "muted"
GOOD_STYLE = "good"
BAD_STYLE = "bad"
WARN_STYLE = "warn"
BARS = "▁▂▃▄▅▆▇█"


def count(value: int | None) -> str:
    """A whole number in at most six characters: 12,345 then 123k, 12.3M."""
    if value is None:
        return DASH
    if abs(value) < 100_000:
        return f"{value:,}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        scaled = value / size
        if abs(scaled) < 99.95:
            return f"{scaled:.1f}{unit}"
        if abs(scaled) < 999.5:
            return f"{scaled:.0f}{unit}"
    return f"{value / 1e15:.1e}P"


def counted(number: int | None, one: str) -> str:
    """A number of things, in words."""
    return f"{count(number)} {one}{'' if number == 1 else 's'}"


def rate(value: float | None) -> str:
    """A figure per second in at most six characters; something that moves is never shown as 0."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    if value < 0.1:
        return "<0.1"
    return f"{value:.1f}" if value < 99.95 else count(round(value))


def milliseconds(value: float | None) -> str:
    """Milliseconds without their unit."""
    if value is None:
        return DASH
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else count(round(value))


def percent(share: float | None) -> str:
    """A share of 1 as per cent."""
    return DASH if share is None else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """A span of time in its two leading units."""
    if seconds is None:
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def brief(seconds: float | None) -> str:
    """A span of time in at most six characters."""
    if seconds is None:
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole}s"
    if whole < 6000:
        return f"{whole // 60}m{whole % 60:02d}"
    return (
        f"{whole // 3600}h{whole % 3600 // 60:02d}"
        if whole < 86400
        else f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    )


def size(number_of_bytes: int | None) -> str:
    """Bytes in binary units."""
    if number_of_bytes is None:
        return DASH
    scaled = float(number_of_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if scaled < 1024:
            return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 99.95 else f"{scaled:.1f} {unit}"
        scaled /= 1024
    return f"{scaled:.1f} TiB"


def word(value: str | None) -> str:
    """A text, or a dash where there is none."""
    return value or DASH


def fitted(text: str, width: int, *, right: bool = False, keep_end: bool = False) -> str:
    """The text in exactly ``width`` cells: cut with an ellipsis (at the front with ``keep_end``), or padded."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        if keep_end:
            return ELLIPSIS + _tail(text, width - 1)
        return set_cell_size(text, width - 1) + ELLIPSIS
    return " " * (width - length) + text if right else text + " " * (width - length)


def _tail(text: str, width: int) -> str:
    """The end of a text, in exactly ``width`` cells; of what takes no cell, not more than a few letters a cell."""
    tail = text[-8 * width :] if width > 0 else ""
    while cell_len(tail) > width:
        tail = tail[1:]
    return " " * (width - cell_len(tail)) + tail


def line(*parts: str | tuple[str, str]) -> Text:
    """A line from plain and styled parts."""
    return Text.assemble(*parts, no_wrap=True, end="")


def cut(text: Text, width: int) -> Text:
    """A line in exactly ``width`` cells."""
    text = text.copy()
    text.truncate(max(width, 0), overflow="ellipsis", pad=True)
    return text


def title(name: str, width: int, *notes: str) -> Text:
    """A rule with a name in it and notes after it; notes that do not fit are left out, the last first."""
    kept = list(notes)
    while kept and cell_len("── " + " ── ".join([name, *kept]) + " ") > width:
        kept.pop()
    text = line(("── ", RULE_STYLE), (name, TITLE_STYLE))
    for note in kept:
        text.append(" ── ", RULE_STYLE)
        text.append(note)
    text.append(" ", RULE_STYLE)
    text.append("─" * max(0, width - text.cell_len), RULE_STYLE)
    return cut(text, width)


def clickable(text: Text, **meta: object) -> Text:
    """The line, known to the mouse: a click on it brings ``meta`` to whoever handles it."""
    text.stylize(Style(meta=dict(meta)))
    return text


def shares(amounts: list[int], cells: int) -> list[int]:
    """Deals ``cells`` out in proportion (largest remainder): whatever is above 0 gets a cell, 0 gets none.

    Returns one count an amount; their sum is ``cells`` unless every amount is 0 (then all are 0). Where there are
    fewer cells than amounts above 0, the first ones get them.
    """
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    exact = [amount * cells / total for amount in amounts]
    dealt = [max(int(part), 1 if amount > 0 else 0) for part, amount in zip(exact, amounts, strict=True)]
    while sum(dealt) < cells:
        dealt[max(range(len(dealt)), key=lambda index: exact[index] - dealt[index])] += 1
    while sum(dealt) > cells:
        largest = max(dealt)
        dealt[len(dealt) - 1 - dealt[::-1].index(largest)] -= 1
    return dealt


def strip(parts: list[tuple[str, str, int]], cells: int) -> Text:
    """A strip of ``cells`` letters: for each (letter, style, amount) its share of them."""
    dealt = shares([amount for _, _, amount in parts], cells)
    return line(*((letter * number, style) for (letter, style, _), number in zip(parts, dealt, strict=True)))


def gauge(part: float | None, cells: int) -> Text:
    """A share of 1 as a bar of ``cells``; a dash where it is unknown."""
    if part is None:
        return line((fitted(DASH, cells), MUTED_STYLE))
    full = round(min(max(part, 0.0), 1.0) * cells)
    return line(("━" * full, "accent"), ("─" * (cells - full), "idle"))


def sparkline(values: Course, top: float) -> str:
    """One bar of eight heights a value, from 0 to ``top``; a space where nothing is known, and only 0 is no bar."""
    return "".join(_bar(value, top) for value in values)


def _bar(value: float | None, top: float) -> str:
    if value is None:
        return " "
    if value <= 0 or top <= 0:
        return "·"
    return BARS[min(len(BARS) - 1, int(value / top * len(BARS)))]


def scale(values: Course) -> float:
    """The top of an axis: the least of 1, 2 or 5 times a power of ten that no value exceeds; 1 where all are 0."""
    largest = max((value for value in values if value is not None), default=0.0)
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if largest <= power * factor * (1 + 1e-9))


def axis(top: float) -> str:
    """The top of an axis in at most five characters."""
    for unit, size in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if top < 1000 * size:
            return f"{top / size:g}{unit}"
    return f"{top:.0e}"


def beside(left: list[Text], right: list[Text], left_width: int, gap: int) -> list[Text]:
    """Two columns as one; the shorter one is filled up with empty lines."""
    joined = []
    for position in range(max(len(left), len(right))):
        text = cut(left[position], left_width) if position < len(left) else line(" " * left_width)
        text.append(" " * gap)
        joined.append(text.append_text(right[position]) if position < len(right) else text)
    return joined
