"""Feeds a journal to a fresh scheduler and compares every plan. Needs no device, no weights and no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenspeed.engine.journaled_scheduler import event_of, plan_rows, submit_again
from tokenspeed.launch.scheduling import make_scheduler
from tokenspeed.telemetry.journal import (
    Advanced,
    Begin,
    JournalError,
    JournalReader,
    Planned,
    Raised,
    Record,
    Submitted,
    row_lines,
)
from tokenspeed_scheduler import CacheGroup, Plan, Role, Scheduler, SchedulerConfig

NO_ERROR = "no error"


@dataclass(frozen=True)
class Divergence:
    """The first call that came out otherwise: what differed, and the lines of both sides."""

    round: int
    what: str
    recorded: list[str]
    replayed: list[str]


@dataclass
class Replay:
    """What a replay found.

    Attributes:
        begin: what the journal says of its scheduler.
        rounds, requests, events, refused: plans compared, requests taken, events, requests refused.
        torn: bytes left out at the end of the file.
        divergence: None where every plan was equal.
        beyond: the error where the journal ends inside a round and its last call, or the plan behind it, raises here;
            else "". The journal cannot tell how those ended.
    """

    begin: Begin
    rounds: int = 0
    requests: int = 0
    events: int = 0
    refused: int = 0
    torn: int = 0
    divergence: Divergence | None = None
    beyond: str = ""


def replay(path: Path) -> Replay:
    """Replays the whole journal, or as far as the first divergence. Raises JournalError where it cannot be read."""
    reader = JournalReader(path)
    replayer = Replayer(reader)
    for _ in replayer.calls():
        pass
    replayer.conclude()
    return replayer.result


class Call(NamedTuple):
    """A call that was made again: as recorded, with the error it raised, and the plan where it is one that came out."""

    record: Record
    raised: Raised | None
    plan: Plan | None


@dataclass
class Replayer:
    """A scheduler like the journal's, which is fed one call after another.

    Attributes:
        scheduler: as the calls made so far left it.
        result: what was found so far.
    """

    reader: JournalReader
    scheduler: Scheduler = field(init=False)
    result: Replay = field(init=False)
    _last: Record | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.reader.begin.implementation, scheduler_config(self.reader.begin))
        self.result = Replay(self.reader.begin)

    def calls(self) -> Iterator[Call]:
        """Makes each call of the journal and yields it; ends with the journal, or behind the first divergence."""
        for record, raised in _calls(self.reader):
            self._last = record
            yield Call(record, raised, self._call(record, raised))
            if self.result.divergence:
                break

    def conclude(self) -> None:
        """Notes how the file ends behind its last call; where that is inside a round, goes on with the round."""
        self.result.torn = self.reader.torn
        if self.reader.is_at_end and isinstance(self._last, Submitted | Advanced):
            self._end_inside_a_round()

    def _call(self, record: Record, raised: Raised | None) -> Plan | None:
        if isinstance(record, Planned):
            return self._plan(record)
        if isinstance(record, Submitted):
            self._submit(record, raised)
        elif isinstance(record, Advanced):
            self._advance(record, raised)
        elif isinstance(record, Raised):
            self._compare("plan", record, _outcome(self.scheduler.plan))
        else:
            raise JournalError(f"{self.reader.path}: begins a second time in round {self.result.rounds}")
        return None

    def _end_inside_a_round(self) -> None:
        """The last call may have raised, or the plan after it, without a word of it in the journal."""
        found, self.result.divergence = self.result.divergence, None
        if found is None:
            self.result.beyond = _outcome(self.scheduler.plan)
        elif found.recorded == [NO_ERROR]:
            self.result.beyond = found.replayed[0]
        else:
            self.result.divergence = found

    def _submit(self, record: Submitted, raised: Raised | None) -> None:
        self.result.requests += raised is None
        self.result.refused += raised is not None
        self._compare(
            f"submit of request {record.handle}", raised, _outcome(lambda: submit_again(self.scheduler, record))
        )

    def _advance(self, record: Advanced, raised: Raised | None) -> None:
        events = [event_of(name, arguments) for name, arguments in record.events]
        self.result.events += len(events)
        self._compare("advance", raised, _outcome(lambda: self.scheduler.advance(events)))

    def _compare(self, call: str, raised: Raised | None, replayed: str) -> None:
        recorded = f"{raised.error}: {raised.text}" if raised else ""
        if recorded.partition(":")[0] != replayed.partition(":")[0]:
            what = f"{call} ended otherwise"
            sides = ([recorded or NO_ERROR], [replayed or NO_ERROR])
            self.result.divergence = Divergence(self.result.rounds + 1, what, *sides)

    def _plan(self, record: Planned) -> Plan | None:
        self.result.rounds += 1
        plan: Plan | None = None

        def call() -> None:
            nonlocal plan
            plan = self.scheduler.plan()

        error = _outcome(call)
        if plan is None:
            lines = row_lines(record.forward_id, record.rows)
            self.result.divergence = Divergence(self.result.rounds, "plan raised", lines, [error])
        elif plan.digest() != record.digest:
            digests = f"digests {record.digest.hex()[:16]} and {plan.digest().hex()[:16]}"
            self.result.divergence = Divergence(
                self.result.rounds,
                f"the plans differ ({digests})",
                row_lines(record.forward_id, record.rows),
                row_lines(plan.forward_id, plan_rows(plan).tobytes()),
            )
        return plan


def _calls(records: Iterator[Record] | JournalReader) -> Iterator[tuple[Record, Raised | None]]:
    """Every call with the error it raised. A plan that raised is its own record, with None beside it."""
    held: Record | None = None
    for record in records:
        if isinstance(record, Raised) and record.call != "plan" and held is not None:
            yield held, record
            held = None
            continue
        if held is not None:
            yield held, None
        held = record
    if held is not None:
        yield held, None


def _outcome(call: Callable[[], Any]) -> str:
    """Calls and returns "" or "class: text" of the error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scheduler_config(begin: Begin) -> SchedulerConfig:
    """The configuration of a journal; raises JournalError where this version's scheduler does not take it."""
    fields = dict(begin.config)
    made_with = ", ".join(f"{name} {version}" for name, version in sorted(begin.made_with.items()))
    try:
        groups = [CacheGroup(**_known(CacheGroup, group)) for group in fields.pop("groups")]
        return SchedulerConfig(role=Role(fields.pop("role")), groups=groups, **_known(SchedulerConfig, fields))
    except (KeyError, ValueError) as error:
        raise JournalError(
            f"the journal's configuration does not suit this version's scheduler: {error}; it was made with {made_with}"
        ) from None


def _known(constructed: type, fields: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(fields) - set(dir(constructed)))
    if unknown:
        raise ValueError(f"{constructed.__name__} has no {', '.join(unknown)}")
    return fields
