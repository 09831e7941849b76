"""The whole screen: which panels stand where, by page and by size."""

from typing import Literal

from rich.text import Text

from tokenspeed_tui.controls import Controls, Shown
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.advice import advise
from tokenspeed_tui.render.cache import cache_page, cache_panel, cache_rows
from tokenspeed_tui.render.configuration import last_scroll, render_configuration
from tokenspeed_tui.render.detail import detail_panel
from tokenspeed_tui.render.events import advice_panel, events_panel, last_event_scroll
from tokenspeed_tui.render.header import notice_lines, render_header
from tokenspeed_tui.render.help import help_panel, last_help_scroll
from tokenspeed_tui.render.machine import absent_words, render_machine
from tokenspeed_tui.render.panel import FRAME_ROWS, FRAME_WIDTH, Panel, draw, inner_size
from tokenspeed_tui.render.rates import rates_page, rates_panel
from tokenspeed_tui.render.requests import requests_panel
from tokenspeed_tui.render.small import render_small
from tokenspeed_tui.render.states import states_panel

Size = Literal["tiny", "normal", "wide"]

GAP = 1
"""Columns between the two halves of the wide screen."""
COMPACT_CACHE_ROWS = 5
COMPACT_RATES_ROWS = 4
MIDDLE_ROWS = 9
EVENT_SHARE = 3
"""The event log has one line in so many of what the wide overview has left for requests and events."""


def size_class(width: int, height: int) -> Size:
    """Below 76x18 there is room for figures only; from 112x34 on the state machine is drawn, and panels have frames."""
    if width < 76 or height < 18:
        return "tiny"
    return "wide" if width >= 112 and height >= 34 else "normal"


def render_screen(picture: Picture, controls: Controls, now: float, width: int, height: int) -> list[Text]:
    """The screen as exactly ``height`` lines of ``width`` cells."""
    kind = size_class(width, height)
    if kind == "tiny" and controls.shown == "main":
        lines = render_small(picture, controls, now, width, height)
    else:
        lines = _above(picture, controls, now, width, kind)
        rows = height - len(lines)
        lines += _page(picture, controls, now, width, rows, kind)
    lines = lines[:height] + [Text("", end="")] * (height - len(lines))
    return [t.cut(part, width) for part in lines]


def scrolled(picture: Picture, controls: Controls, now: float, width: int, height: int, step: int) -> int:
    """The scroll of the page on the screen after ``step`` lines more; stays at either end of what there is."""
    kind = size_class(width, height)
    rows = height - len(_above(picture, controls, now, width, kind))
    if controls.shown == "configuration":
        last = last_scroll(picture, rows, width)
    elif controls.shown == "help":
        last = last_help_scroll(controls, *inner_size(width, rows, frame=kind == "wide"))
    else:
        last = last_event_scroll(picture, _event_rows(picture, now, width, rows, frame=kind == "wide"))
    return min(max(controls.scroll + step, 0), last)


def _above(picture: Picture, controls: Controls, now: float, width: int, kind: Size) -> list[Text]:
    """What stands above every page: the header; on the smallest screens only what is wrong with the server."""
    header = notice_lines(picture, controls, width) if kind == "tiny" else render_header(picture, controls, now, width)
    return [t.cut(part, width) for part in header]


def _page(picture: Picture, controls: Controls, now: float, width: int, rows: int, kind: Size) -> list[Text]:
    frame = kind == "wide"
    if controls.shown == "configuration":
        return render_configuration(picture, controls, now, width, rows)
    if controls.shown == "events":
        return _events_page(picture, controls, now, width, rows, frame=frame)
    if controls.shown == "main":
        return _wide(picture, controls, now, width, rows) if frame else _normal(picture, controls, width, rows)
    columns, lines = inner_size(width, rows, frame=frame)
    return draw(_single(controls.shown, picture, controls, columns, lines), width, rows, frame=frame)


def _single(shown: Shown, picture: Picture, controls: Controls, columns: int, lines: int) -> Panel:
    """The panel of a page that has but one."""
    if shown == "help":
        return help_panel(controls, columns, lines)
    if shown == "detail":
        return detail_panel(picture, controls, columns, lines)
    if shown == "cache":
        return cache_page(picture, controls, columns, lines)
    if shown == "rates":
        return rates_page(picture, controls, columns, lines)
    return requests_panel(picture, controls, columns, lines)


def _normal(picture: Picture, controls: Controls, width: int, rows: int) -> list[Text]:
    """One column: states as a list, the cache, rates, requests."""
    lines = draw(states_panel(picture, width), width, 7, frame=False)
    cache = 1 + cache_rows(picture, controls, most=COMPACT_CACHE_ROWS - 1)
    lines += draw(cache_panel(picture, controls, width, cache - 1), width, cache, frame=False)
    rates = COMPACT_RATES_ROWS if rows < 30 else COMPACT_RATES_ROWS + 4
    lines += draw(rates_panel(picture, controls, width, rates - 1), width, rates, frame=False)
    left = rows - len(lines)
    return lines + draw(requests_panel(picture, controls, width, left - 1), width, left, frame=False)


def _wide(picture: Picture, controls: Controls, now: float, width: int, rows: int) -> list[Text]:
    """The state machine drawn over the whole width; below it cache and rates side by side, requests, events."""
    machine = render_machine(picture, width - FRAME_WIDTH)
    panel = Panel("States", ["requests now", "flow per second"], machine, page="main", foot=absent_words(picture))
    lines = draw(panel, width, len(machine) + FRAME_ROWS, frame=True)
    left_width = (width - GAP) // 2
    right_width = width - GAP - left_width
    middle = max(MIDDLE_ROWS, min(rows // 4, 14))
    columns, inner = inner_size(left_width, middle, frame=True)
    cache = draw(cache_panel(picture, controls, columns, inner), left_width, middle, frame=True)
    columns, inner = inner_size(right_width, middle, frame=True)
    rates = draw(rates_panel(picture, controls, columns, inner), right_width, middle, frame=True)
    lines += t.beside(cache, rates, left_width, GAP)
    left = rows - len(lines)
    events = max(FRAME_ROWS + 2, left // EVENT_SHARE)
    columns, inner = inner_size(width, left - events, frame=True)
    lines += draw(requests_panel(picture, controls, columns, inner), width, left - events, frame=True)
    columns, inner = inner_size(width, events, frame=True)
    return lines + draw(events_panel(picture, controls, now, columns, inner), width, events, frame=True)


def _events_page(picture: Picture, controls: Controls, now: float, width: int, rows: int, *, frame: bool) -> list[Text]:
    """All findings of the advisor above the log."""
    event_rows = _event_rows(picture, now, width, rows, frame=frame)
    log_rows = event_rows + (FRAME_ROWS if frame else 1)
    columns, _ = inner_size(width, rows, frame=frame)
    findings = draw(advice_panel(advise(picture, now), columns), width, rows - log_rows, frame=frame)
    return findings + draw(events_panel(picture, controls, now, columns, event_rows), width, log_rows, frame=frame)


def _event_rows(picture: Picture, now: float, width: int, rows: int, *, frame: bool) -> int:
    """Lines for events on their page: what the findings leave, at least half of it."""
    columns, _ = inner_size(width, rows, frame=frame)
    edges = FRAME_ROWS if frame else 1
    findings = len(advice_panel(advise(picture, now), columns).body) + edges
    return max(rows // 2, rows - findings) - edges
