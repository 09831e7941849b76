"""The event log and the advisor: what happened, what is wrong, and which knob mends it."""

import textwrap

from rich.text import Text

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.advice import Advice
from tokenspeed_tui.render.panel import Panel
from tokenspeed_tui.view import EventView

KINDS = {
    "retraction": ("X retraction", "warn"),
    "abort": ("! abort", "bad"),
    "eviction_burst": ("C evictions", "cached"),
    "nan": ("! NaN", "bad"),
    "failed_step": ("! failed step", "bad"),
    "restart": ("R restart", "bad"),
    "stuck": ("! stuck", "bad"),
    "storage_timeout": ("F storage late", "warn"),
    "slow_reader": ("< slow reader", "warn"),
    "refused": ("! refused", "warn"),
    "away": ("– away", "bad"),
    "back": ("+ back", "good"),
}
"""How a kind of event is written, and the name of a style; a kind that is not known is written as it came."""
AGE_WIDTH, KIND_WIDTH, NAME_WIDTH = 7, 14, 9
LEAST_TEXT_WIDTH = 16
CALM = "nothing needs turning"
SIGNS = {"bad": "✖", "warn": "▲", "hint": "○"}


def advice_lines(advice: tuple[Advice, ...], width: int, most: int) -> list[Text]:
    """The worst findings in at most ``most`` lines, and how many more there are; calm is said too."""
    if not advice:
        return [t.line((f"✓ {CALM}", t.GOOD_STYLE))]
    lines: list[Text] = []
    shown = 0
    for item in advice:
        if len(lines) == most:
            break
        text, room = f"{SIGNS[item.severity]} {item.text}", most - len(lines)
        wrapped = textwrap.wrap(text, max(width, 1), max_lines=room, placeholder=f" {t.ELLIPSIS}")
        lines += [t.line((part, _style(item))) for part in wrapped]
        shown += 1
    more = f" (+{len(advice) - shown}: e)" if len(advice) > shown else ""
    if more and lines[-1].cell_len + len(more) > width:
        lines[-1].truncate(max(0, width - len(more)), overflow="ellipsis")
    lines[-1].append(more, t.MUTED_STYLE)
    return [t.clickable(part, page="events") for part in lines]


def advice_panel(advice: tuple[Advice, ...], width: int) -> Panel:
    """Every finding, the worst first."""
    lines: list[Text] = []
    for item in advice:
        wrapped = textwrap.wrap(item.text, max(width - 2, 1))
        lines += [
            t.line((f"{SIGNS[item.severity]} " if number == 0 else "  ", _style(item)), part)
            for number, part in enumerate(wrapped)
        ]
    return Panel(
        "Advice", [t.counted(len(advice), "finding")], lines or [t.line((f"✓ {CALM}", t.GOOD_STYLE))], page="events"
    )


def _style(advice: Advice) -> str:
    return {"bad": t.BAD_STYLE, "warn": t.WARN_STYLE, "hint": "accent"}[advice.severity]


def events_panel(picture: Picture, controls: Controls, now: float, width: int, rows: int) -> Panel:
    """The newest events first: one line each in a part of the screen; in full, and from ``controls.scroll`` on, where
    the log has a page of its own."""
    events = list(reversed(picture.events))
    whole = controls.shown == "events"
    first = min(controls.scroll, last_event_scroll(picture, rows)) if whole else 0
    lines: list[Text] = []
    shown = 0
    for event in events[first:]:
        if len(lines) >= rows:
            break
        lines += _event_lines(event, now, width, wrap=whole)
        shown += 1
    older = len(events) - first - shown
    notes = [f"{first} newer, {older} older" if first or older else f"{len(events)} kept"]
    return Panel("Events", notes, lines or [t.line((f"{t.DASH} nothing has happened", t.MUTED_STYLE))], page="events")


def last_event_scroll(picture: Picture, rows: int) -> int:
    """The largest scroll that still fills ``rows`` lines with events of one line."""
    return max(0, len(picture.events) - rows)


def _event_lines(event: EventView, now: float, width: int, *, wrap: bool) -> list[Text]:
    """When, what, whose and the sentence; that over several lines with ``wrap``."""
    age = t.brief(max(0.0, now - event.time)) if event.time is not None else t.DASH
    kind, style = KINDS.get(event.kind or "", (t.word(event.kind), t.MUTED_STYLE))
    front = t.line(
        (t.fitted(age, AGE_WIDTH, right=True), t.MUTED_STYLE),
        " ",
        (t.fitted(kind, KIND_WIDTH), style),
        " ",
        (t.fitted(event.request_id or "", NAME_WIDTH, keep_end=True), t.MUTED_STYLE),
        " ",
    )
    room = width - front.cell_len
    text = event.text or ""
    parts = textwrap.wrap(text, room) if wrap and room >= LEAST_TEXT_WIDTH else [text]
    lines = [front.append(parts[0] if parts else "")]
    lines += [t.line(" " * (width - room), part) for part in parts[1:]]
    return [t.cut(line, width) for line in lines]
