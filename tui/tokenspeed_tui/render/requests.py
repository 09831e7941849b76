"""The requests: a table, and one request by itself."""

from typing import NamedTuple

from rich.text import Text

from tokenspeed_tui.controls import Controls, ordered_requests, selected_index
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.view import RequestView, SnapshotView


class Columns(NamedTuple):
    """Heading and width of each column, in cells; the reason takes what is left."""

    name: int
    state: int
    figures: tuple[tuple[str, int], ...]


NARROW = Columns(9, 12, (("age", 5), ("prompt", 6), ("output", 6), ("cached", 6), ("blk", 5), ("rt", 2), ("pr", 2)))
WIDE = Columns(
    18, 21, (("rounds", 6), ("prompt", 6), ("output", 6), ("cached", 6), ("blocks", 6), ("retr", 4), ("prio", 4))
)


def render_requests(picture: Picture, controls: Controls, width: int, rows: int) -> list[Text]:
    """A title, a heading and as many requests as fit, with the selected one in view."""
    snapshot = picture.snapshot or SnapshotView()
    requests = ordered_requests(picture, controls.sort)
    counts = f"{t.count(snapshot.running)} running, {t.count(snapshot.waiting)} waiting"
    columns = WIDE if width >= 110 else NARROW
    lines = [t.title("Requests", width, counts, f"by {controls.sort}"), _heading(columns)]
    room = max(0, rows - len(lines))
    index = selected_index(requests, controls.selected)
    omitted = snapshot.requests_omitted or 0
    if index is None:
        lines.append(t.line(("no live requests" if picture.snapshot is not None else t.DASH, "dim")))
        return [t.cut(part, width) for part in lines][:rows]
    hidden = len(requests) + omitted > room
    visible = max(1, room - 1) if hidden else room
    first = min(max(0, index - visible + 1), max(0, len(requests) - visible))
    for position in range(first, min(first + visible, len(requests))):
        lines.append(_row(requests[position], columns, width, position == index))
    if hidden and len(lines) < rows:
        above, below = first, len(requests) + omitted - first - visible
        lines.append(t.line((f"{above} more above, {below} more below", "dim")))
    return [t.cut(part, width) for part in lines][:rows]


def _heading(columns: Columns) -> Text:
    cells = ["  " + t.fitted("request", columns.name), t.fitted("state", columns.state)]
    cells += [t.fitted(name, figure_width, right=True) for name, figure_width in columns.figures]
    return t.line((" ".join([*cells, "why"]), "dim"))


def _row(request: RequestView, columns: Columns, width: int, selected: bool) -> Text:
    figures = (
        request.age_rounds,
        request.prompt_tokens,
        request.generated_tokens,
        request.cached_tokens,
        request.blocks,
        request.retractions,
        request.priority,
    )
    cells = [t.fitted(t.word(request.request_id), columns.name, keep_end=True)]
    cells.append(t.fitted(t.word(request.state), columns.state))
    for value, (_, figure_width) in zip(figures, columns.figures, strict=True):
        cells.append(t.fitted(t.count(value), figure_width, right=True))
    text = t.cut(t.line("> " if selected else "  ", " ".join([*cells, request.reason or ""])), width)
    if selected:
        text.stylize("bold reverse")
    return text


def render_detail(picture: Picture, controls: Controls, width: int, rows: int) -> list[Text]:
    """Everything known about the selected request: its figures, why it waits, the states it was seen in."""
    requests = ordered_requests(picture, controls.sort)
    chosen = next((request for request in requests if request.handle == controls.selected), None)
    if chosen is None:
        lines = [t.title("Request", width), t.line("It ended, or fell out of the table. Esc goes back.")]
        return [t.cut(part, width) for part in lines][:rows]
    fields = [
        ("state", f"{t.word(chosen.state)}, for {t.count(chosen.age_rounds)} rounds"),
        ("why", chosen.reason or "nothing holds it up"),
        ("prompt", f"{t.count(chosen.prompt_tokens)} tokens, {t.count(chosen.cached_tokens)} from the prefix cache"),
        ("computed", f"{t.count(chosen.computed_tokens)} tokens in {t.count(chosen.blocks)} blocks"),
        ("output", f"{t.count(chosen.generated_tokens)} tokens"),
        ("retracted", f"{t.count(chosen.retractions)} times"),
        ("priority", f"{t.count(chosen.priority)}, internal handle {t.count(chosen.handle)}"),
    ]
    lines = [t.title("Request", width, t.word(chosen.request_id), "Esc goes back")]
    lines += [t.line((t.fitted(name, 11), "dim"), value) for name, value in fields]
    lines += _timeline(picture, chosen, width)
    return [t.cut(part, width) for part in lines][:rows]


def _timeline(picture: Picture, request: RequestView, width: int) -> list[Text]:
    """The states in which this dashboard saw the request; what lies between two polls it cannot have seen."""
    stays = picture.timelines.get(request.handle or 0, ())
    time = picture.snapshot.time if picture.snapshot is not None else None
    lines = [t.title("States it was seen in", width, "at least so long, as seen by polls")]
    for position, stay in enumerate(stays):
        until = stays[position + 1].since if position + 1 < len(stays) else time
        span = t.duration(until - stay.since) if until is not None else t.DASH
        lines.append(t.line((t.fitted(stay.state, 22), t.TITLE_STYLE), span))
    return lines
