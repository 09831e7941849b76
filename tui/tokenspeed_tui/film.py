"""Frames in a row, to be looked at in any order: what a journal is to the dashboard. Who makes them is elsewhere."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from tokenspeed_tui.observation import RECORDING_VERSION, Observation, Probe
from tokenspeed_tui.picture import Picture, advance

BEHIND = 60
"""So many frames before the one that is shown are folded into its picture: what rates and courses are made of."""

Progress = Callable[[int, int], None]
"""Told on a long way: how far it is, and where it goes."""


class Shot(NamedTuple):
    """One frame: its number, what a server would tell of that moment (see Observation.state), what was decided."""

    number: int
    state: dict[str, Any]
    decided: str


class Film(Protocol):
    """Numbered frames from 1 on. One thread uses it at a time; nothing is raised for a number beyond the ends."""

    @property
    def title(self) -> str:
        """What is looked at, in a few words."""

    @property
    def length(self) -> int:
        """How many frames there are, as far as is known."""

    @property
    def warning(self) -> str:
        """Why it is shorter than it was said to be; "" where all is well."""

    def shot(self, number: int, progress: Progress) -> Shot:
        """The frame, or the nearest there is."""

    def next_event(self, number: int, *, forward: bool, progress: Progress) -> int | None:
        """The nearest frame behind or before it in which something happened; None where there is none."""

    def detail(self, request: str, number: int, progress: Progress) -> dict[str, Any] | None:
        """What a server would tell of a request at that moment; None where it has none of that name."""


class View(NamedTuple):
    """What is on the screen of a film."""

    number: int
    picture: Picture
    decided: str


def look(film: Film, before: View | None, target: int, progress: Progress) -> View:
    """The view of a frame. One step forward goes on from the view before; any other way folds anew."""
    shot = film.shot(target, progress)
    if before is not None and shot.number == before.number + 1:
        return View(shot.number, advance(before.picture, observed(film, shot)), shot.decided)
    picture = Picture(url=film.title)
    for number in range(max(1, shot.number - BEHIND), shot.number):
        picture = advance(picture, observed(film, film.shot(number, progress)))
    return View(shot.number, advance(picture, observed(film, shot)), shot.decided)


def with_detail(film: Film, view: View, request: str, progress: Progress) -> View:
    """The view with what is known of one request."""
    detail = film.detail(request, view.number, progress)
    error = "" if detail is not None else f"request {request} is not in the journal up to round {view.number:,}"
    again = observed(film, film.shot(view.number, progress))
    told = msgspec.structs.replace(again, detail=detail, detail_error=error)
    return view._replace(picture=advance(view.picture, told))


def observed(film: Film, shot: Shot) -> Observation:
    """The frame as a look at a server that is well."""
    good = Probe(status=200)
    time = float(shot.state["snapshot"]["time"])
    return Observation(
        version=RECORDING_VERSION, time=time, url=film.title, live=good, ready=good, progress=good, state=shot.state
    )
