"""What happened that somebody may want to hear of, until it is sent."""

import time
from collections import deque
from collections.abc import Callable

from tokenspeed.messages.snapshot import EventKind, EventSnapshot

MAX_EVENTS = 64


class EventLog:
    """The newest MAX_EVENTS events that were not taken yet, numbered from 1 on in the order of their times."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._waiting: deque[tuple[float, EventKind, str, str]] = deque(maxlen=MAX_EVENTS)
        self._taken = 0

    def add(self, kind: EventKind, text: str, request_id: str = "", at: float | None = None) -> None:
        """Notes an event; ``at`` is when it happened (seconds since the epoch), now where it is not given."""
        self._waiting.append((self._wall_clock() if at is None else at, kind, request_id, text))

    def take(self) -> list[EventSnapshot]:
        """Returns what was added since this was last asked, the oldest first."""
        events = []
        for at, kind, request_id, text in sorted(self._waiting, key=lambda event: event[0]):
            self._taken += 1
            events.append(EventSnapshot(sequence=self._taken, time=at, kind=kind, request_id=request_id, text=text))
        self._waiting.clear()
        return events
