"""What the loop tells those who look: events, snapshots, and answers about single requests."""

from collections.abc import Mapping

from tokenspeed.engine.details import Inspector
from tokenspeed.engine.ended import EndedRequest, EndedRequests
from tokenspeed.engine.event_log import EventLog
from tokenspeed.engine.held import HeldRequests
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.engine.snapshots import Moment, Snapshots
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.messages import PROTOCOL_VERSION, EngineInput, EngineSnapshot, Inspect, Inspected, Submit
from tokenspeed.messages.snapshot import EventKind
from tokenspeed_scheduler import Scheduler

LEFT = "its client left, or an operator or a deadline ended it"


class Telemetry:
    """Of one loop, whose thread owns it.

    Attributes:
        events: what happened since the last snapshot.
    """

    def __init__(self, scheduler: Scheduler, statistics: EngineStatistics, live: Mapping[int, LiveRequest]) -> None:
        self._scheduler = scheduler
        self._statistics = statistics
        self._ended = EndedRequests()
        self._inspector = Inspector(scheduler, live, self._ended)
        self._inspects: list[Inspect] = []
        self.events = EventLog(statistics.wall_clock)
        self._snapshots = Snapshots(scheduler, statistics, self.events, self._inspector.name_of)

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._statistics.wall_clock()

    def stamp(self) -> None:
        """Tells the scheduler the time, before it is advanced: what happens to requests now happened then."""
        self._scheduler.set_time(self.now())

    def take(self, message: EngineInput) -> None:
        """Takes in what the frontend wants to know."""
        self._inspects += message.inspects
        if message.watch_s > 0:
            self._statistics.watch(message.watch_s)

    def ended(self, submit: Submit, reason: str, error: str = "", kind: EventKind | None = "abort") -> None:
        """A request is gone; where something went wrong that is an event of ``kind``, too (None: it is not)."""
        now = self.now()
        self._ended.add(EndedRequest(submit.handle, submit.request_id, now, reason, error))
        if error and kind is not None:
            self.events.add(kind, error, submit.request_id, now)

    def answers(self, held: HeldRequests, paused: bool) -> list[Inspected]:
        """The answers that are due, once; to be sent at the end of a round."""
        if not self._inspects:
            return []
        inspects, self._inspects = self._inspects, []
        waiting, now = held.waiting(), self.now()
        return [
            Inspected(
                version=PROTOCOL_VERSION,
                number=inspect.number,
                detail=self._inspector.detail(inspect.name, waiting, now, paused),
            )
            for inspect in inspects
        ]

    def snapshot(self, moment: Moment) -> EngineSnapshot:
        """The state as it is now."""
        return EngineSnapshot(version=PROTOCOL_VERSION, snapshot=self._snapshots.take(moment))
