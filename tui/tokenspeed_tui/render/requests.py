"""The requests as a table: what waits and why, what runs and how far it is."""

from typing import NamedTuple

from rich.text import Text

from tokenspeed_tui.controls import Controls, listed_requests, selected_index
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.panel import Panel
from tokenspeed_tui.view import RequestView, SnapshotView


class Columns(NamedTuple):
    """Widths of the columns in cells, and the headings of the figures; the reason takes what is left."""

    handle: int
    name: int
    state: int
    progress: int
    figures: tuple[tuple[str, int], ...]


TINY = Columns(4, 0, 10, 0, (("age", 5),))
NARROW = Columns(4, 6, 10, 0, (("age", 5), ("prompt", 6), ("output", 6), ("blk", 5)))
WIDE = Columns(
    5,
    12,
    11,
    6,
    (("age", 6), ("prompt", 6), ("output", 6), ("cached", 6), ("blocks", 6), ("host", 5), ("rt", 2), ("pr", 2)),
)
NARROW_WIDTH, WIDE_WIDTH = 70, 106


def requests_panel(picture: Picture, controls: Controls, width: int, rows: int) -> Panel:
    """A heading and as many requests as fit, with the selected one in view."""
    snapshot = picture.snapshot or SnapshotView()
    requests = listed_requests(picture, controls)
    columns = WIDE if width >= WIDE_WIDTH else NARROW if width >= NARROW_WIDTH else TINY
    lines = [_heading(columns)]
    index = selected_index(requests, controls.selected)
    if index is None:
        absence = t.DASH if picture.snapshot is None or snapshot.complete is False else _absence(picture, controls)
        lines.append(t.line((absence, t.MUTED_STYLE)))
        return Panel("Requests", _notes(snapshot, controls), lines, page="requests")
    room = max(0, rows - len(lines))
    omitted = 0 if controls.pattern else snapshot.requests_omitted or 0
    hidden = len(requests) + omitted > room
    visible = max(1, room - 1) if hidden else room
    first = min(max(0, index - visible + 1), max(0, len(requests) - visible))
    for position in range(first, min(first + visible, len(requests))):
        lines.append(_row(requests[position], columns, width, position == index))
    if hidden and len(lines) < rows:
        above, below = first, len(requests) + omitted - first - visible
        lines.append(t.line((f"{above} more above, {below} more below", t.MUTED_STYLE)))
    return Panel("Requests", _notes(snapshot, controls), lines, page="requests")


def _notes(snapshot: SnapshotView, controls: Controls) -> list[str]:
    notes = [f"{t.count(snapshot.running)} running, {t.count(snapshot.waiting)} waiting", f"by {controls.sort}"]
    return [f"/{controls.pattern}/", *notes] if controls.pattern else notes


def _absence(picture: Picture, controls: Controls) -> str:
    snapshot = picture.snapshot
    if controls.pattern and snapshot is not None and snapshot.requests:
        return f"none of {len(snapshot.requests)} requests has {controls.pattern!r} in its id, state or reason"
    return "no live requests"


def _heading(columns: Columns) -> Text:
    cells = ["  " + t.fitted("#", columns.handle), t.fitted("id", columns.name), t.fitted("state", columns.state)]
    if columns.progress:
        cells.append(t.fitted("done", columns.progress))
    cells += [t.fitted(name, figure_width, right=True) for name, figure_width in columns.figures]
    return t.line((" ".join([*cells, "why"]), t.MUTED_STYLE))


def age_words(request: RequestView) -> str:
    """The time in the present state; rounds where an older server tells no more."""
    if request.age_s is None and request.age_rounds is not None:
        return f"{t.count(request.age_rounds)}r"
    return t.brief(request.age_s)


def progress(request: RequestView) -> float | None:
    """How far a request is, of 1: through its prompt until that is computed, then through its output."""
    if not request.generated_tokens:
        done, whole = request.computed_tokens, request.prompt_tokens
    else:
        done, whole = request.generated_tokens, request.output_limit
    return min(1.0, done / whole) if done is not None and whole else None


def _row(request: RequestView, columns: Columns, width: int, selected: bool) -> Text:
    figures: dict[str, str] = {
        "age": age_words(request),
        "prompt": t.count(request.prompt_tokens),
        "output": t.count(request.generated_tokens),
        "cached": t.count(request.cached_tokens),
        "blk": t.count(request.blocks),
        "blocks": t.count(request.blocks),
        "host": t.count(request.host_blocks),
        "rt": t.count(request.retractions),
        "pr": t.count(request.priority),
    }
    text = t.line(
        "> " if selected else "  ",
        t.fitted(str(request.handle) if request.handle is not None else t.DASH, columns.handle),
        " ",
        t.fitted(t.word(request.request_id), columns.name, keep_end=True),
        " ",
        (t.fitted(t.word(request.state), columns.state), _state_style(request)),
        " ",
    )
    if columns.progress:
        text.append_text(t.gauge(progress(request), columns.progress)).append(" ")
    text.append(" ".join(t.fitted(figures[name], cells, right=True) for name, cells in columns.figures))
    if request.reason:
        text.append(f" {request.reason}", t.WARN_STYLE)
    text = t.cut(text, width)
    if selected:
        text.stylize("selected")
    return t.clickable(text, request=request.handle)


def _state_style(request: RequestView) -> str:
    if request.state in ("Decoding", "PrefillDone"):
        return "decode"
    return "prefill" if request.state == "Prefilling" else t.WARN_STYLE
