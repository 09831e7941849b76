"""What the person at the keyboard has chosen: immutable, beside the picture, the second input of every render."""

from typing import Literal, get_args

import msgspec

from tokenspeed_tui.picture import Picture
from tokenspeed_tui.themes import ThemeName
from tokenspeed_tui.view import RequestView

SortKey = Literal["interest", "age", "state", "prompt", "output", "cached", "blocks", "retractions", "priority"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)
INTERVALS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""The polling intervals that + and - step through, in seconds."""
DEFAULT_INTERVAL = 0.5
WINDOWS = (30.0, 60.0, 300.0, 900.0)
"""The spans of time that [ and ] step through, in seconds."""
DEFAULT_WINDOW = 60.0

Shown = Literal["main", "requests", "cache", "rates", "events", "configuration", "detail", "help"]
PAGES: dict[str, Shown] = {"1": "main", "2": "requests", "3": "cache", "4": "rates"}
"""Keys and the pages that they show."""


class KeyWords(msgspec.Struct, frozen=True):
    """A key as the help lists it: how it is written, its short name, and what it does."""

    key: str
    name: str
    does: str


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the keys.

    Attributes:
        interval: seconds between polls.
        window: seconds that a sparkline spans.
        paused: whether the picture stands still.
        sort: the order of the requests table.
        pattern: what a request's handle (#7), id, state or reason must hold to be listed; "" lists all.
        selected: handle of the selected request; None selects the first row.
        group: the cache group that is shown by itself; "" shows all.
        shown: what fills the screen.
        before: what was there before the detail, for the way back.
        scroll: the first line in view of a page that is longer than the screen; 0 is the top.
        keys: what the help lists.
        theme: dark or light, or one without colours of its own.
        replaying: whether the observations come from a recording.
        ended: whether that recording is at its end.
    """

    interval: float = DEFAULT_INTERVAL
    window: float = DEFAULT_WINDOW
    paused: bool = False
    sort: SortKey = "interest"
    pattern: str = ""
    selected: int | None = None
    group: str = ""
    shown: Shown = "main"
    before: Shown = "main"
    scroll: int = 0
    keys: tuple[KeyWords, ...] = ()
    theme: ThemeName = "dark"
    replaying: bool = False
    ended: bool = False


def stepped_interval(interval: float, faster: bool) -> float:
    """The next interval of INTERVALS in the direction asked for; the same at either end."""
    return _stepped(INTERVALS, interval, -1 if faster else 1)


def stepped_window(window: float, wider: bool) -> float:
    """The next window of WINDOWS in the direction asked for; the same at either end."""
    return _stepped(WINDOWS, window, 1 if wider else -1)


def _stepped(steps: tuple[float, ...], value: float, direction: int) -> float:
    if direction < 0:
        return max((step for step in steps if step < value), default=min(value, steps[0]))
    return min((step for step in steps if step > value), default=max(value, steps[-1]))


def next_sort(sort: SortKey) -> SortKey:
    """The sort key after this one, round and round."""
    return SORT_KEYS[(SORT_KEYS.index(sort) + 1) % len(SORT_KEYS)]


def next_group(picture: Picture, group: str) -> str:
    """The cache group after this one, round and round; "" (all of them) stands before the first."""
    groups = picture.snapshot.groups if picture.snapshot is not None else ()
    names = ["", *(item.group_id for item in groups if item.group_id)]
    return names[(names.index(group) + 1) % len(names)] if group in names else ""


def listed_requests(picture: Picture, controls: Controls) -> list[RequestView]:
    """The requests that the pattern lets through, in the order of the table."""
    requests = ordered_requests(picture, controls.sort)
    pattern = controls.pattern.lower()
    return [request for request in requests if pattern in _searched(request)] if pattern else requests


def _searched(request: RequestView) -> str:
    return " ".join(filter(None, (f"#{request.handle}", request.request_id, request.state, request.reason))).lower()


def ordered_requests(picture: Picture, sort: SortKey) -> list[RequestView]:
    """The requests in an order: by interest as the server sends them, by a figure the largest first, by state the order
    of the transition table; unknown figures last, ties by interest."""
    snapshot = picture.snapshot
    if snapshot is None:
        return []
    requests = list(snapshot.requests)
    if sort == "interest":
        return requests
    if sort == "state":
        order = {name: position for position, name in enumerate(snapshot.states)}
        return sorted(requests, key=lambda request: order.get(request.state or "", len(order)))
    return sorted(requests, key=lambda request: _descending(_figure(request, sort)))


def _figure(request: RequestView, sort: SortKey) -> float | None:
    figures: dict[SortKey, float | None] = {
        "age": request.age_s if request.age_s is not None else request.age_rounds,
        "prompt": request.prompt_tokens,
        "output": request.generated_tokens,
        "cached": request.cached_tokens,
        "blocks": request.blocks,
        "retractions": request.retractions,
        "priority": request.priority,
    }
    return figures[sort]


def _descending(figure: float | None) -> tuple[bool, float]:
    return figure is None, -(figure or 0)


def selected_index(requests: list[RequestView], selected: int | None) -> int | None:
    """The row of the selected request; the first where it is gone or none is selected; None without requests."""
    for index, request in enumerate(requests):
        if selected is not None and request.handle == selected:
            return index
    return 0 if requests else None


def moved_selection(picture: Picture, controls: Controls, step: int) -> int | None:
    """The handle selected after moving by ``step`` rows; stays at either end."""
    requests = listed_requests(picture, controls)
    index = selected_index(requests, controls.selected)
    if index is None:
        return None
    return requests[min(max(index + step, 0), len(requests) - 1)].handle


def chosen_request(picture: Picture, selected: int | None) -> RequestView | None:
    """The selected request among the live ones."""
    requests = picture.snapshot.requests if picture.snapshot is not None else ()
    return next((request for request in requests if request.handle == selected), None)
