"""How long a request may take: its ``timeout`` field, its X-Request-Deadline header, and the server's own bound."""

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from tokenspeed.server.errors import ApiError, past_deadline

HEADER = "x-request-deadline"


@dataclass(frozen=True)
class Arrival:
    """When the running task's request came.

    Attributes:
        at: by ``clock``, in seconds.
        wall: seconds since the epoch.
        header: its X-Request-Deadline, "" without one.
        most_s: what the server allows any request; 0 is no bound.
    """

    at: float
    wall: float
    header: str
    most_s: float
    clock: Callable[[], float]


_arrival: ContextVar[Arrival | None] = ContextVar("arrival", default=None)


def arrived(header: str, most_s: float, clock: Callable[[], float]) -> None:
    """Notes that the running task's request came now."""
    _arrival.set(Arrival(clock(), time.time(), header, most_s, clock))


def time_left(timeout: float | None) -> float | None:
    """Returns the seconds that the running task's request has left, None for no bound.

    The first of all bounds counts, each from the request's arrival; ``timeout`` is its own field, in seconds. Raises
    ApiError: 504 where the time is over, 400 for a header that is no time.
    """
    arrival = _arrival.get()
    if arrival is None:
        return timeout
    bounds = [timeout, arrival.most_s or None, _until(arrival)]
    given = [bound for bound in bounds if bound is not None]
    if not given:
        return None
    left = min(given) - (arrival.clock() - arrival.at)
    if left <= 0:
        raise past_deadline("the request's time was over before it was worked on")
    return left


def _until(arrival: Arrival) -> float | None:
    if not arrival.header:
        return None
    try:
        moment = float(arrival.header)
    except ValueError:
        moment = math.nan
    if not math.isfinite(moment):
        raise ApiError(
            400,
            f"the header X-Request-Deadline is {arrival.header[:64]!r}; it is a time in seconds since 1970 (UTC), "
            "as 1800000000.5",
            code="invalid_value",
            param="X-Request-Deadline",
        )
    return moment - arrival.wall
