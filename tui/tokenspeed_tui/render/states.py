"""The state machine as a list, where there is no room to draw it: states with live counts, arrows with their flow."""

from rich.text import Text

from tokenspeed.telemetry.snapshot import STATES
from tokenspeed_tui.machine import Arrow
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.rates import flow_totals
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.machine import state_count
from tokenspeed_tui.render.panel import Panel

NUMBERS = {name: position for position, name in enumerate(STATES, start=1)}
COUNT_WIDTH = 6
SHORT_NAME = 16
"""Room for a name in two columns of 39: only PrefillAwaitingResult is cut."""


def states_panel(picture: Picture, width: int) -> Panel:
    """Six lines of two states each."""
    left_width = width // 2
    half = len(STATES) // 2
    lines = []
    for left, right in zip(STATES[:half], STATES[half:], strict=True):
        joined = _state_line(picture, left, left_width, SHORT_NAME)
        joined.append_text(_state_line(picture, right, width - left_width, SHORT_NAME))
        lines.append(joined)
    return Panel("States", ["requests now", "flow per second, → names a state by its number"], lines, page="main")


def _state_line(picture: Picture, name: str, width: int, name_width: int) -> Text:
    number = state_count(picture, name)
    style = t.MUTED_STYLE if not number else ("accent" if name == "Finished" else "count")
    text = t.line(
        (f"{NUMBERS[name]:2d} ", t.RULE_STYLE),
        (t.fitted(name, name_width), style),
        (t.fitted(t.count(number), COUNT_WIDTH, right=True), style),
        " ",
    )
    arrows = _arrows(picture, name, width - text.cell_len - 1)
    moving = any(rate for (source, _), rate in picture.rates.flows.items() if source == name)
    text.append(arrows, "flow" if moving else "idle")
    return t.cut(text, width)


def _arrows(picture: Picture, name: str, width: int) -> str:
    """The arrows out of a state, the busiest first: with names if all fit, else with numbers, as many as fit."""
    known = flow_totals(picture.snapshot) if picture.snapshot is not None else {}
    out = [arrow for arrow in known if arrow[0] == name]
    out.sort(key=lambda arrow: (-picture.rates.flows.get(arrow, 0.0), -known[arrow], NUMBERS.get(arrow[1], 0)))
    spelled = " ".join(f"→{arrow[1]} {_arrow_rate(picture, arrow)}" for arrow in out)
    if len(spelled) <= width:
        return spelled
    text = ""
    for position, arrow in enumerate(out):
        part = f"→{NUMBERS.get(arrow[1], '?')} {_arrow_rate(picture, arrow)}"
        longer = f"{text} {part}".strip()
        room = width if position == len(out) - 1 else width - 2
        if len(longer) > room:
            return f"{text} {t.ELLIPSIS}".strip()
        text = longer
    return text


def _arrow_rate(picture: Picture, arrow: Arrow) -> str:
    return t.rate(picture.rates.flows.get(arrow))
