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
AGE_WIDTH, KIND_WIDTH = 7, 14
CALM = "nothing needs turning"
SIGNS = {"bad": "✖", "warn": "▲", "hint": "○"}


def advice_lines(advice: tuple[Advice, ...], width: int, most: int) -> list[Text]:
    """The worst finding, and how many more there are; calm is said too."""
    if not advice:
        return [t.line((f"✓ {CALM}", t.GOOD_STYLE))]
    worst = advice[0]
    more = f" (+{len(advice) - 1}: e)" if len(advice) > 1 else ""
    text = f"{SIGNS[worst.severity]} {worst.text}"
    wrapped = textwrap.wrap(text, max(width - len(more), 1), max_lines=most, placeholder=f" {t.ELLIPSIS}")
    lines = [t.line((part, _style(worst))) for part in wrapped]
    if more:
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
    return Panel("Advice", [f"{len(advice)} findings"], lines or [t.line((f"✓ {CALM}", t.GOOD_STYLE))], page="events")


def _style(advice: Advice) -> str:
    return {"bad": t.BAD_STYLE, "warn": t.WARN_STYLE, "hint": "accent"}[advice.severity]


def events_panel(picture: Picture, controls: Controls, now: float, width: int, rows: int) -> Panel:
    """The newest events first, from ``controls.scroll`` on where the log has the screen to itself."""
    events = list(reversed(picture.events))
    first = min(controls.scroll, last_event_scroll(picture, rows)) if controls.shown == "events" else 0
    lines = [_event_line(event, now, width) for event in events[first : first + rows]]
    notes = (
        [f"{len(events)} kept"]
        if len(events) <= rows
        else [f"{first} newer, {max(0, len(events) - first - rows)} older"]
    )
    return Panel("Events", notes, lines or [t.line((f"{t.DASH} nothing has happened", t.MUTED_STYLE))], page="events")


def last_event_scroll(picture: Picture, rows: int) -> int:
    """The largest scroll that still fills ``rows`` lines."""
    return max(0, len(picture.events) - rows)


def _event_line(event: EventView, now: float, width: int) -> Text:
    age = t.brief(max(0.0, now - event.time)) if event.time is not None else t.DASH
    kind, style = KINDS.get(event.kind or "", (t.word(event.kind), t.MUTED_STYLE))
    text = t.line(
        (t.fitted(age, AGE_WIDTH, right=True), t.MUTED_STYLE),
        " ",
        (t.fitted(kind, KIND_WIDTH), style),
        " ",
        event.text or "",
    )
    if event.request_id and event.request_id not in (event.text or ""):
        text.append(f"  {event.request_id}", t.MUTED_STYLE)
    return t.cut(text, width)
