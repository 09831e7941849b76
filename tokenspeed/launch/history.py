"""A journal as a film: the state after any of its rounds, made by feeding a scheduler again. No device, no torch.

A scheduler cannot go back, so a round that lies behind is reached from the journal's start, at tens of thousands of
rounds a second; the states of the rounds that led there are kept, so that the next steps back cost nothing. What is
kept is bounded, however long the journal is.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenspeed.device.handle import StepTimings
from tokenspeed.engine.details import Inspector
from tokenspeed.engine.ended import EndedRequest, EndedRequests
from tokenspeed.engine.event_log import MAX_EVENTS, EventLog
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.engine.snapshots import Moment, Snapshots
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.launch.journal_facts import specs_of, submit_of
from tokenspeed.launch.replay import Call, Divergence, Replayer, scheduler_config
from tokenspeed.messages.snapshot import EventKind, EventSnapshot, RequestDetail, StateSnapshot
from tokenspeed.telemetry.journal import (
    Advanced,
    Begin,
    JournalError,
    JournalReader,
    Planned,
    Raised,
    Submitted,
)
from tokenspeed_scheduler import Decision, Plan, Scheduler

ROUND_S = 1.0
"""A journal knows no time: a round counts as a second, so what is told "per second" is per round."""

KEPT_FRAMES = 1024
KEPT_BEHIND = 512
"""So many rounds before the one that was asked for are kept on the way there, for steps back."""

KEPT_CURSORS = 3
"""So many schedulers stay where they are: going to and fro between places makes nothing again."""

PROGRESS_EVERY = 4096
NO_TIMINGS = StepTimings(queued=0.0, prepare=0.0, forward=0.0, sample=0.0)

Progress = Callable[[int, int], None]
"""Told on a long way: rounds made so far, and the one that is asked for."""


def no_progress(done: int, target: int) -> None:
    """Tells nobody."""


class Frame(NamedTuple):
    """The state after the plan of one round: ``number`` (the first is 1), and what that plan decided, in words."""

    number: int
    snapshot: StateSnapshot
    decided: str


_frames = msgspec.msgpack.Decoder(Frame)


class JournalHistory:
    """The rounds of a journal, to be looked at in any order. One thread uses it.

    Attributes:
        begin: what the journal says of its scheduler.
        rounds: how many there are; fewer once a plan was found that came out otherwise.
        divergence: that plan; what would follow is not what happened, and is not shown.

    Raises JournalError where the file cannot be read, has no round, or needs another version's scheduler.
    """

    def __init__(self, path: Path) -> None:
        reader = JournalReader(path)
        self.path = path
        self.begin = reader.begin
        self.rounds = sum(isinstance(record, Planned) for record in reader)
        self.divergence: Divergence | None = None
        if not self.rounds:
            raise JournalError(f"{path}: holds no round: its engine ended before it planned one")
        self._frames: OrderedDict[int, bytes] = OrderedDict()
        self._telling = array("q")
        self._told_to = 0
        self._cursors = [self._start()]
        self._scout = self._start()
        self._followed: tuple[_Watched, _Cursor] | None = None

    def frame(self, number: int, progress: Progress = no_progress) -> Frame:
        """The state after round ``number``, or after the nearest there is."""
        number = self._within(number)
        if number not in self._frames:
            self._go_to(number, progress)
        return _frames.decode(self._frames[self._within(number)])

    def next_event(self, number: int, *, forward: bool, progress: Progress = no_progress) -> int | None:
        """The nearest round behind (or before) ``number`` that retracted, restored, aborted or refused something.

        None where there is none that way.
        """
        if not forward:
            at = bisect_left(self._telling, number)
            return self._telling[at - 1] if at else None
        while (at := bisect_right(self._telling, number)) == len(self._telling):
            if not self._scan(progress):
                return None
        return self._telling[at]

    def detail(self, handle: int, number: int | None, progress: Progress = no_progress) -> RequestDetail | None:
        """What became of a request up to the plan of round ``number``, or in all the journal tells where that is None.

        None for a handle that was not taken until then.
        """
        target = self.rounds if number is None else self._within(number)
        if self._followed is None or self._followed[0].handle != handle or self._followed[1].number > target:
            self._followed = (_Watched(handle), self._start())
        watched, cursor = self._followed
        while cursor.number < target and cursor.step():
            watched.look(cursor)
            if cursor.number % PROGRESS_EVERY == 0:
                progress(cursor.number, target)
        if number is None:
            self._followed = None  # it goes on behind the last plan: no way back to that
            while cursor.step():
                pass
            watched.look(cursor)
        return watched.detail(cursor)

    def handles(self) -> Iterator[int]:
        """The handles of every request of the journal, refused ones too, in their order."""
        return (record.handle for record in JournalReader(self.path) if isinstance(record, Submitted))

    def _start(self) -> "_Cursor":
        return _Cursor(self.begin, JournalReader(self.path))

    def _within(self, number: int) -> int:
        return min(max(number, 1), self.rounds)

    def _scan(self, progress: Progress) -> bool:
        """Looks for one more event, with a cursor that does nothing else; False where there is none any more."""
        cursor, known = self._scout, len(self._telling)
        while len(self._telling) == known:
            if cursor.number >= self.rounds:
                return False
            if not cursor.step():
                self._end_at(cursor)
                return False
            self._learn(cursor)
            if cursor.number % PROGRESS_EVERY == 0:
                progress(cursor.number, self.rounds)
        return True

    def _learn(self, cursor: "_Cursor") -> None:
        """Notes whether the cursor's round tells something."""
        if cursor.number > self._told_to:
            self._told_to = cursor.number
            if cursor.tells:
                self._telling.append(cursor.number)

    def _end_at(self, cursor: "_Cursor") -> None:
        """The film goes no further than this cursor came: what is recorded behind it does not follow from here."""
        self.divergence = cursor.divergence
        self.rounds = cursor.number

    def _go_to(self, target: int, progress: Progress) -> None:
        cursor = self._nearest(target)
        while cursor.number < min(target, self.rounds) and cursor.step():
            self._learn(cursor)
            if cursor.number > target - KEPT_BEHIND:
                self._keep(cursor.frame())
            if cursor.number % PROGRESS_EVERY == 0:
                progress(cursor.number, target)
        if cursor.number < min(target, self.rounds) or cursor.divergence is not None:
            self._end_at(cursor)
            self._keep(cursor.frame())

    def _nearest(self, target: int) -> "_Cursor":
        """The last cursor before the round; a new one where there is none, which takes the place of the first."""
        before = [cursor for cursor in self._cursors if cursor.number < target]
        if before:
            return max(before, key=lambda cursor: cursor.number)
        self._cursors = [*self._cursors, self._start()][-KEPT_CURSORS:]
        return self._cursors[-1]

    def _keep(self, frame: Frame) -> None:
        self._frames[frame.number] = msgspec.msgpack.encode(frame)
        self._frames.move_to_end(frame.number)
        while len(self._frames) > KEPT_FRAMES:
            self._frames.popitem(last=False)


class _Cursor:
    """A scheduler on its way through a journal, with what an engine would know beside it.

    Attributes:
        number: the round whose plan was the last; 0 before the first.
        tells: whether that round has something to tell.
    """

    def __init__(self, begin: Begin, reader: JournalReader) -> None:
        config = scheduler_config(begin)
        self.number = 0
        self.tells = False
        self._max_model_len = config.max_model_len
        self._replayer = Replayer(reader)
        self._calls = self._replayer.calls()
        self._plan: Plan | None = None
        self._refused: list[str] = []
        self._raised_plans = 0
        self._live: dict[int, LiveRequest] = {}
        self._ended = EndedRequests()
        self._events: deque[EventSnapshot] = deque(maxlen=MAX_EVENTS)
        self._told = 0
        role = config.role.name.lower()
        self._statistics = EngineStatistics(specs_of(config), role, clock=self._now, wall_clock=self._now)
        self._statistics.watch(math.inf)
        self._inspector = Inspector(self.scheduler, self._live, self._ended)
        # Events are gathered here, round by round: which frames somebody looked at must not change them.
        unused = EventLog(self._now)
        self._snapshots = Snapshots(self.scheduler, self._statistics, unused, self._inspector.name_of)
        self.scheduler.set_time(ROUND_S)

    @property
    def scheduler(self) -> Scheduler:
        """As the last call left it."""
        return self._replayer.scheduler

    @property
    def divergence(self) -> Divergence | None:
        """Where a plan came out otherwise."""
        return self._replayer.result.divergence

    def step(self) -> bool:
        """Makes the calls up to the next plan; False where there is none."""
        self._refused = []
        for call in self._calls:
            self._note(call)
            if isinstance(call.record, Planned):
                self._planned(call.plan)
                return True
        return False

    def frame(self) -> Frame:
        """The present state."""
        snapshot = self._snapshots.take(
            Moment(live=self._live, held=(), held_count=0, paused=False, storage=None, storage_pending=0)
        )
        snapshot = msgspec.structs.replace(snapshot, events=list(self._events))
        return Frame(self.number, snapshot, "; ".join([*self._decided(), *self._refused]))

    def detail(self, handle: int) -> RequestDetail | None:
        """What is known of a request; None where it never came, or ended long ago."""
        return self._inspector.detail(str(handle), (), self._now(), paused=False)

    def lives(self, handle: int) -> bool:
        """Whether the scheduler has it."""
        return self.scheduler.explain(handle).code != "ended"

    def _now(self) -> float:
        return self.number * ROUND_S

    def _note(self, call: Call) -> None:
        record = call.record
        if isinstance(record, Submitted):
            if call.raised is None:
                self._live[record.handle] = LiveRequest.of(submit_of(record), self._max_model_len)
            else:
                self._refused.append(f"request {record.handle} refused: {call.raised.text}")
        elif isinstance(record, Advanced) and call.raised is None:
            for name, arguments in record.events:
                if name == "ForwardResult":
                    self._statistics.step_landed(NO_TIMINGS)
                elif name in ("Finish", "Abort"):
                    self._end(name, arguments[0])
        elif isinstance(record, Raised):
            self._raised_plans += 1
            self._refused.append(f"plan raised {record.error}: {record.text}")
        elif call.raised is not None:
            self._refused.append(f"advance raised {call.raised.error}: {call.raised.text}")

    def _end(self, name: str, handle: object) -> None:
        if not isinstance(handle, int) or self._live.pop(handle, None) is None:
            return
        if name == "Finish":
            self._statistics.finished += 1
            self._ended.add(EndedRequest(handle, str(handle), self._now(), "finished"))
        else:
            self._statistics.aborted += 1
            self._ended.add(
                EndedRequest(handle, str(handle), self._now(), "aborted", "the engine or its client ended it")
            )

    def _planned(self, plan: Plan | None) -> None:
        self.number += 1
        self._statistics.round_ended(0.0, 0.0)
        self.scheduler.set_time(self._now() + ROUND_S)
        self._plan = plan
        if plan is None:
            return
        if plan.num_rows:
            self._statistics.step_started(plan)
        notes = self.scheduler.take_notes()
        for note in notes:
            self._tell("retraction" if note.kind == "retraction" else "storage_timeout", note.handle, note.text)
        for abort in plan.aborts:
            self._live.pop(abort.handle, None)
            self._ended.add(EndedRequest(abort.handle, str(abort.handle), self._now(), "abort", abort.detail))
            self._tell("abort", abort.handle, abort.detail)
        decision = self._decision()
        self.tells = bool(notes or plan.aborts or self._refused or (decision and decision.restored))

    def _tell(self, kind: EventKind, handle: int, text: str) -> None:
        self._told += 1
        event = EventSnapshot(sequence=self._told, time=self._now(), kind=kind, request_id=str(handle), text=text)
        self._events.append(event)

    def _decision(self) -> Decision | None:
        """Of this round; None where it did and refused nothing."""
        last = self.scheduler.decisions(1)
        return last[0] if last and last[0].round == self.number + self._raised_plans else None

    def _decided(self) -> Iterator[str]:
        decision = self._decision()
        if decision is None:
            yield "nothing to plan"
            return
        prefill = f"{decision.prefill_rows} prefill rows ({decision.prefill_tokens} tokens)"
        yield f"{prefill}, {decision.decode_rows} decode rows"
        for name in ("retracted", "restored"):
            handles = getattr(decision, name)
            if handles:
                yield f"{name} {', '.join(map(str, handles))}"
        if decision.evictions:
            yield f"{decision.evictions} cached blocks evicted"
        for abort in self._plan.aborts if self._plan is not None else ():
            yield f"request {abort.handle} aborted: {abort.detail}"


@dataclass
class _Watched:
    """One request, followed from round to round: an engine remembers only the last that ended."""

    handle: int
    seen: bool = False
    last: RequestDetail | None = None

    def look(self, cursor: _Cursor) -> None:
        """Notes the end of its life, once."""
        if self.last is not None:
            return
        alive = cursor.lives(self.handle)
        if self.seen and not alive:
            self.last = cursor.detail(self.handle)
        self.seen = alive

    def detail(self, cursor: _Cursor) -> RequestDetail | None:
        """What is known now; None where it never came."""
        return self.last or cursor.detail(self.handle)
