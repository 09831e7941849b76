"""What the person at the keyboard has chosen: immutable, beside the picture, the second input of every render."""

from typing import Literal, get_args

import msgspec

from tokenspeed_tui.picture import Picture
from tokenspeed_tui.view import RequestView

SortKey = Literal["age", "state", "prompt", "output", "cached", "blocks", "retractions", "priority"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)
INTERVALS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""The polling intervals that + and - step through, in seconds."""
DEFAULT_INTERVAL = 0.5

Shown = Literal["main", "help", "detail", "configuration"]


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the keys.

    Attributes:
        interval: seconds between polls.
        paused: whether the picture stands still.
        sort: the order of the requests table.
        selected: handle of the selected request; None selects the first row.
        shown: what fills the screen.
        scroll: the first key of the configuration that is in view; 0 is the top.
        keys: (key, what it does), for the help.
        replaying: whether the observations come from a recording.
        ended: whether that recording is at its end.
    """

    interval: float = DEFAULT_INTERVAL
    paused: bool = False
    sort: SortKey = "age"
    selected: int | None = None
    shown: Shown = "main"
    scroll: int = 0
    keys: tuple[tuple[str, str], ...] = ()
    replaying: bool = False
    ended: bool = False


def stepped_interval(interval: float, faster: bool) -> float:
    """The next interval of INTERVALS in the direction asked for; the same at either end."""
    if faster:
        return max((step for step in INTERVALS if step < interval), default=min(interval, INTERVALS[0]))
    return min((step for step in INTERVALS if step > interval), default=max(interval, INTERVALS[-1]))


def next_sort(sort: SortKey) -> SortKey:
    """The sort key after this one, round and round."""
    return SORT_KEYS[(SORT_KEYS.index(sort) + 1) % len(SORT_KEYS)]


def ordered_requests(picture: Picture, sort: SortKey) -> list[RequestView]:
    """The requests in the order of the table: by age the oldest first (as the server sends them), by a figure the
    largest first, by state the order of the transition table; unknown figures last, ties by age."""
    snapshot = picture.snapshot
    if snapshot is None:
        return []
    requests = list(snapshot.requests)
    if sort == "age":
        return requests
    if sort == "state":
        order = {name: position for position, name in enumerate(snapshot.states)}
        return sorted(requests, key=lambda request: order.get(request.state or "", len(order)))
    return sorted(requests, key=lambda request: _descending(_figure(request, sort)))


def _figure(request: RequestView, sort: SortKey) -> int | None:
    figures: dict[SortKey, int | None] = {
        "prompt": request.prompt_tokens,
        "output": request.generated_tokens,
        "cached": request.cached_tokens,
        "blocks": request.blocks,
        "retractions": request.retractions,
        "priority": request.priority,
    }
    return figures[sort]


def _descending(figure: int | None) -> tuple[bool, int]:
    return figure is None, -(figure or 0)


def selected_index(requests: list[RequestView], selected: int | None) -> int | None:
    """The row of the selected request; the first where it is gone or none is selected; None without requests."""
    for index, request in enumerate(requests):
        if selected is not None and request.handle == selected:
            return index
    return 0 if requests else None


def moved_selection(picture: Picture, controls: Controls, step: int) -> int | None:
    """The handle selected after moving by ``step`` rows; stays at either end."""
    requests = ordered_requests(picture, controls.sort)
    index = selected_index(requests, controls.selected)
    if index is None:
        return None
    return requests[min(max(index + step, 0), len(requests) - 1)].handle
