"""Panels: a name, notes and lines, in a frame where there is room for one and below a rule where there is not."""

from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from tokenspeed_tui.controls import Shown
from tokenspeed_tui.render import text as t

FRAME_WIDTH = 4
"""Columns of a frame: a stroke and a space at each side."""
FRAME_ROWS = 2


class Panel(NamedTuple):
    """What a panel shows.

    Attributes:
        title: its name.
        notes: beside the name, the most telling first; those that do not fit are left out.
        body: its lines.
        page: what a click on the name shows.
        foot: in the frame's lower edge.
    """

    title: str
    notes: list[str]
    body: list[Text]
    page: Shown | None = None
    foot: str = ""


def framed(panel: Panel, width: int, rows: int) -> list[Text]:
    """The panel in a frame, exactly ``rows`` lines."""
    inner = max(0, width - FRAME_WIDTH)
    lines = [_edge(panel, width)]
    for position in range(max(0, rows - FRAME_ROWS)):
        body = panel.body[position] if position < len(panel.body) else t.line("")
        lines.append(t.line(("│ ", t.RULE_STYLE)).append_text(t.cut(body, inner)).append(" │", t.RULE_STYLE))
    foot = f" {panel.foot} " if panel.foot and cell_len(panel.foot) + 6 <= width else ""
    lines.append(
        t.line(
            ("╰─", t.RULE_STYLE),
            (foot, t.MUTED_STYLE),
            ("─" * max(0, width - 3 - cell_len(foot)) + "╯", t.RULE_STYLE),
        )
    )
    return [t.cut(part, width) for part in lines][:rows]


def ruled(panel: Panel, width: int, rows: int) -> list[Text]:
    """The panel below a rule, at most ``rows`` lines."""
    return [_rule(panel, width), *(t.cut(part, width) for part in panel.body)][:rows]


def draw(panel: Panel, width: int, rows: int, *, frame: bool) -> list[Text]:
    """The panel in ``rows`` lines, with or without a frame."""
    if frame:
        return framed(panel, width, rows)
    lines = ruled(panel, width, rows)
    return lines + [t.cut(t.line(""), width)] * (rows - len(lines))


def inner_size(width: int, rows: int, *, frame: bool) -> tuple[int, int]:
    """Columns and lines for the body of a panel of that size."""
    return (max(0, width - FRAME_WIDTH), max(0, rows - FRAME_ROWS)) if frame else (width, max(0, rows - 1))


def _edge(panel: Panel, width: int) -> Text:
    """The upper edge of a frame, with name and notes."""
    edge = t.line(("╭", t.RULE_STYLE)).append_text(_rule(panel, width - 2)).append("╮", t.RULE_STYLE)
    return t.clickable(edge, page=panel.page) if panel.page else edge


def _rule(panel: Panel, width: int) -> Text:
    rule = t.title(panel.title, width, *filter(None, panel.notes))
    return t.clickable(rule, page=panel.page) if panel.page else rule
