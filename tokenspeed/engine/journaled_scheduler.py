"""A scheduler whose every input is written to a journal before it takes it. The loop cannot tell the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.telemetry.journal import Advanced, Begin, JournalError, Planned, Raised, Record, Submitted

if TYPE_CHECKING:
    from tokenspeed_scheduler import (
        Decision,
        Description,
        Event,
        Explanation,
        Headroom,
        Note,
        Plan,
        PoolMaps,
        RequestRow,
        Scheduler,
        SchedulerConfig,
        Snapshot,
    )

EVENT_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "ForwardResult": ("forward_id", "tokens", "failed"),
    "Finish": ("handle",),
    "Abort": ("handle",),
    "OperationDone": ("op_id", "succeeded"),
    "Tick": ("now",),
    "ForgetCache": (),
    "Bootstrapped": ("handle",),
    "RemotePrefillDone": ("handle", "first_token"),
}
"""Every event by the name of its class, with its arguments in the order of its constructor."""

ARRAY_TYPES = {"tokens": np.int32, "failed": np.uint8, "succeeded": np.uint8}
"""Of the arguments of events that are arrays."""

ROW_COLUMNS = ("handle", "kind", "prefix_len", "input_len")


class RecordWriter(Protocol):
    """Where the records go: a journal's file, or the other ranks of an engine."""

    def append(self, record: Record) -> None: ...

    def flush(self) -> None: ...


class JournaledScheduler:
    """Has the members of ``Scheduler`` and is used in its place; see tokenspeed.telemetry.journal for what is written.

    A batch of no events is no input and is not written.
    """

    def __init__(self, scheduler: Scheduler, writer: RecordWriter) -> None:
        self._scheduler = scheduler
        self._writer = writer

    def submit(
        self,
        handle: int,
        prompt: NDArray[np.int32],
        *,
        max_new_tokens: int,
        declared: bool = True,
        priority: int = 0,
        namespace: bytes = b"",
        max_cached_prefix_tokens: int = -1,
    ) -> None:
        self._writer.append(
            Submitted(handle, prompt.tobytes(), max_new_tokens, declared, priority, namespace, max_cached_prefix_tokens)
        )
        self._writer.flush()
        try:
            self._scheduler.submit(
                handle,
                prompt,
                max_new_tokens=max_new_tokens,
                declared=declared,
                priority=priority,
                namespace=namespace,
                max_cached_prefix_tokens=max_cached_prefix_tokens,
            )
        except Exception as error:
            self._raised("submit", error)
            raise

    def advance(self, events: Sequence[Event]) -> None:
        if not events:
            self._scheduler.advance(events)
            return
        self._writer.append(Advanced([event_record(event) for event in events]))
        self._writer.flush()
        try:
            self._scheduler.advance(events)
        except Exception as error:
            self._raised("advance", error)
            raise

    def plan(self) -> Plan:
        self._writer.flush()
        try:
            plan = self._scheduler.plan()
        except Exception as error:
            self._raised("plan", error)
            raise
        self._writer.append(Planned(plan.digest(), plan.forward_id, plan_rows(plan).tobytes()))
        return plan

    def snapshot(self) -> Snapshot:
        return self._scheduler.snapshot()

    def requests(self, limit: int = 200) -> list[RequestRow]:
        return self._scheduler.requests(limit)

    def set_time(self, seconds: float) -> None:
        self._scheduler.set_time(seconds)

    def maps(self, cells: int = 256) -> PoolMaps:
        return self._scheduler.maps(cells)

    def headroom(self, typical_tokens: int = 0) -> Headroom:
        return self._scheduler.headroom(typical_tokens)

    def describe(self, handle: int) -> Description:
        return self._scheduler.describe(handle)

    def take_notes(self) -> list[Note]:
        return self._scheduler.take_notes()

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def explain(self, handle: int) -> Explanation:
        return self._scheduler.explain(handle)

    def decisions(self, last: int = 64) -> list[Decision]:
        return self._scheduler.decisions(last)

    def max_single_request_tokens(self) -> int:
        return self._scheduler.max_single_request_tokens()

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()

    def _raised(self, call: str, error: Exception) -> None:
        self._writer.append(Raised(call, type(error).__name__, str(error)))
        self._writer.flush()


def event_record(event: Event) -> tuple[str, list[int | bytes | None]]:
    """The event as it stands in a journal."""
    name = type(event).__name__
    return name, [_plain(getattr(event, argument)) for argument in EVENT_ARGUMENTS[name]]


def submit_again(scheduler: Scheduler, record: Submitted) -> None:
    """Submits the request of a record; raises whatever that does."""
    scheduler.submit(
        record.handle,
        np.frombuffer(record.prompt, dtype="<i4").astype(np.int32),
        max_new_tokens=record.max_new_tokens,
        declared=record.declared,
        priority=record.priority,
        namespace=record.namespace,
        max_cached_prefix_tokens=record.max_cached_prefix_tokens,
    )


def event_of(name: str, arguments: list[int | bytes | None]) -> Event:
    """The event that a record holds under this name; raises JournalError for a name that is not known here."""
    import tokenspeed_scheduler

    if name not in EVENT_ARGUMENTS or len(EVENT_ARGUMENTS[name]) != len(arguments):
        raise JournalError(f"the journal holds an event {name}{tuple(arguments)}, which this version does not know")
    values: list[Any] = []
    for argument, value in zip(EVENT_ARGUMENTS[name], arguments, strict=True):
        values.append(np.frombuffer(value, dtype=ARRAY_TYPES[argument]) if isinstance(value, bytes) else value)
    event: Event = getattr(tokenspeed_scheduler, name)(*values)
    return event


def _plain(value: Any) -> int | bytes | None:
    return value.tobytes() if isinstance(value, np.ndarray) else value


def plan_rows(plan: Plan) -> NDArray[np.int32]:
    """int32 [4, num_rows]: ROW_COLUMNS of every row."""
    return np.stack([getattr(plan, column) for column in ROW_COLUMNS])


def begin_record(implementation: str, config: SchedulerConfig, made_with: dict[str, str]) -> Begin:
    """The first record of a journal: every public attribute of ``config`` is an argument of its constructor."""
    fields = _fields(config)
    fields["role"] = int(config.role)
    fields["groups"] = [_fields(group) for group in config.groups]
    return Begin(implementation, fields, made_with)


def _fields(record: object) -> dict[str, Any]:
    return {name: getattr(record, name) for name in dir(record) if not name.startswith("_")}
