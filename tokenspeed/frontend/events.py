"""What happened, engines and restarts included: one numbered ring for as long as the server runs."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from tokenspeed.messages.snapshot import EventKind, EventSnapshot

MAX_EVENTS = 64
SELDOM_S = 10.0


class EventRing:
    """The newest MAX_EVENTS, the oldest first. An engine numbers its own from 1 on; here they get new numbers, so that
    what was before a restart stays.

    Attributes:
        counts: how many there ever were, by kind.
    """

    def __init__(
        self, wall_clock: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_clock = wall_clock
        self._clock = clock
        self._events: deque[EventSnapshot] = deque(maxlen=MAX_EVENTS)
        self._told: dict[str, float] = {}
        self.counts: Counter[EventKind] = Counter()

    def __len__(self) -> int:
        return len(self._events)

    def all(self) -> list[EventSnapshot]:
        """Returns them."""
        return list(self._events)

    def take(self, events: Sequence[EventSnapshot]) -> None:
        """Takes over what an engine tells."""
        for event in events:
            self._append(msgspec.structs.replace(event, sequence=self._next()))

    def add(self, kind: EventKind, text: str, request_id: str = "") -> None:
        """Notes what this process saw happen now."""
        self._append(
            EventSnapshot(sequence=self._next(), time=self._wall_clock(), kind=kind, request_id=request_id, text=text)
        )

    def add_seldom(self, about: str, kind: EventKind, text: str) -> None:
        """The same, where nothing was noted ``about`` this for SELDOM_S: what clients can repeat must not fill the
        ring."""
        now = self._clock()
        self._told = {name: at for name, at in self._told.items() if now - at < SELDOM_S}
        if about not in self._told:
            self._told[about] = now
            self.add(kind, text)

    def _append(self, event: EventSnapshot) -> None:
        self._events.append(event)
        self.counts[event.kind] += 1

    def _next(self) -> int:
        return self._events[-1].sequence + 1 if self._events else 1
