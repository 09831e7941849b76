"""Rows of requests and everything about one of them, as the wire has it: the scheduler's answers with the names, times
and ends that only the loop knows."""

from collections.abc import Mapping, Sequence

import msgspec

from tokenspeed.engine.ended import EndedRequest, EndedRequests
from tokenspeed.engine.held import HeldRequest
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.messages.snapshot import HELD, STATES, RequestDetail, RequestSnapshot, TimelineEntry
from tokenspeed_scheduler import Description, RequestRow, Scheduler

PAUSED = "an operator has paused the engine: no step is planned until POST /continue_generation (admin port)"
COMPILING = (
    "what its answer has to keep to is being compiled (response_format, tools, bad_words, thinking_token_budget): the "
    "scheduler gets it after that; api.structured_output: none refuses the first two"
)


def state_name(state: int) -> str:
    """Returns the name of a state as the transition table and the dashboard spell it."""
    return STATES[int(state)]


def row_snapshot(row: RequestRow, live: LiveRequest | None, now: float, paused: bool) -> RequestSnapshot:
    """Returns the row of one of the scheduler's requests. ``now`` in seconds since the epoch."""
    return RequestSnapshot(
        handle=row.handle,
        request_id=live.submit.request_id if live is not None else "",
        state=state_name(row.state),
        age_rounds=row.age_rounds,
        priority=row.priority,
        prompt_tokens=row.prompt_tokens,
        computed_tokens=row.computed_tokens,
        generated_tokens=row.generated_tokens,
        cached_tokens=row.cached_tokens,
        blocks=row.blocks,
        retractions=row.retractions,
        reason=PAUSED if paused else row.reason,
        age_s=max(0.0, now - row.since),
        arrived=row.arrived,
        host_blocks=row.host_blocks,
        output_limit=row.max_new_tokens,
        deadline=(live.submit.deadline or None) if live is not None else None,
    )


def held_snapshot(held: HeldRequest, now: float) -> RequestSnapshot:
    """Returns the row of a request whose rules are being compiled."""
    submit = held.submit
    return RequestSnapshot(
        handle=submit.handle,
        request_id=submit.request_id,
        state=HELD,
        age_rounds=0,
        priority=submit.priority,
        prompt_tokens=len(submit.prompt) // 4,
        computed_tokens=0,
        generated_tokens=0,
        cached_tokens=0,
        blocks=0,
        retractions=0,
        reason=COMPILING,
        age_s=max(0.0, now - held.arrived),
        arrived=held.arrived,
        output_limit=submit.max_new_tokens,
        deadline=submit.deadline or None,
    )


class Inspector:
    """Answers what is known of one request."""

    def __init__(self, scheduler: Scheduler, live: Mapping[int, LiveRequest], ended: EndedRequests) -> None:
        self._scheduler = scheduler
        self._live = live
        self._ended = ended

    def name_of(self, handle: int) -> str:
        """The request id of a handle, "" where it is not known any more."""
        if handle in self._live:
            return self._live[handle].submit.request_id
        ended = self._ended.get(handle)
        return ended.request_id if ended is not None else ""

    def detail(self, name: str, held: Sequence[HeldRequest], now: float, paused: bool) -> RequestDetail | None:
        """Returns everything about the request with this id, or this handle where ``name`` is digits.

        Of a call with several choices, whose ids end in /0, /1 ..., the call's own id finds the first that is known.
        None where it neither lives nor is among the last that ended.
        """
        waiting = {one.submit.request_id: one for one in held}
        handles = self._ended.by_name()
        handles.update((request.submit.request_id, handle) for handle, request in self._live.items())
        found = next((known for known in (name, f"{name}/0") if known in waiting or known in handles), None)
        if found in waiting:
            return _held_detail(waiting[found], now)
        if found is not None:
            return self._of_handle(handles[found], now, paused)
        if not name.isdigit():
            return None
        by_handle = next((one for one in held if one.submit.handle == int(name)), None)
        return _held_detail(by_handle, now) if by_handle is not None else self._of_handle(int(name), now, paused)

    def _of_handle(self, handle: int, now: float, paused: bool) -> RequestDetail | None:
        live, ended = self._live.get(handle), self._ended.get(handle)
        if live is None and ended is None:
            return None
        said = self._scheduler.describe(handle)
        row = row_snapshot(said.row, live, now, paused and live is not None)
        explain = ([PAUSED] if paused and live is not None else []) + list(said.lines)
        if ended is not None and live is None:
            row = msgspec.structs.replace(row, request_id=ended.request_id, reason="")
            explain = [_end_of(ended)]
        return RequestDetail(
            **{name: getattr(row, name) for name in row.__struct_fields__},
            time=now,
            timeline=_timeline(said),
            timeline_omitted=said.visits_omitted,
            explain=explain,
            ended=ended.time if ended is not None else None,
            finish_reason=ended.finish_reason if ended is not None else "",
            error=ended.error if ended is not None else "",
        )


def _held_detail(held: HeldRequest, now: float) -> RequestDetail:
    row = held_snapshot(held, now)
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    return RequestDetail(
        **fields, time=now, timeline=[TimelineEntry(state=HELD, time=held.arrived, round=0)], explain=[COMPILING]
    )


def _timeline(said: Description) -> list[TimelineEntry]:
    return [TimelineEntry(state=state_name(visit.state), time=visit.time, round=visit.round) for visit in said.visits]


def _end_of(ended: EndedRequest) -> str:
    if ended.error:
        return f"it ended: {ended.error}"
    words = {
        "stop": "its text was complete",
        "length": "it has all the tokens that it may have (max_tokens, or the model's length)",
        "abort": "its client left, or an operator or a deadline ended it",
    }
    return f"it ended: {words.get(ended.finish_reason, ended.finish_reason)}"
