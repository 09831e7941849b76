"""The scheduler's plain twin: the same members and the same promises, by the plainest rule for each, in Python.

It exists to be read and to be compared with: whatever the workload, an engine that runs it gives the same tokens as one
that runs the native scheduler. It has no prefix cache, no host or storage tier and no reserves, and it is slow.

The line is the requests by priority (larger first), then by age. A round goes along it twice: decodes, then chunks of
prompts. A request of the line that lacks a block takes it from the last resident of the line, which computes again
later; so the first resident always gets on. A prompt that is not resident waits for room and holds up those behind.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed_scheduler import (
    Abort,
    Event,
    Finish,
    ForwardResult,
    RequestRefused,
    Role,
    RowKind,
    SchedulerConfig,
    State,
    single_request_bound,
)
from tokenspeed_scheduler.reference_picture import (
    MAX_ENDED,
    MAX_VISITS,
    ReferenceDescription,
    ReferenceHeadroom,
    ReferenceMaps,
    interest,
    measured_headroom,
)
from tokenspeed_scheduler.reference_pool import Pool, Table, make_table
from tokenspeed_scheduler.reference_reports import (
    ReferenceExplanation,
    ReferencePlan,
    ReferenceRow,
    ReferenceSnapshot,
    Request,
    Row,
    Visit,
    make_plan,
)

NOT_OF_THIS_ROLE = (State.BOOTSTRAPPING, State.REMOTE_PREFILLING, State.PREFILL_AWAITING_RESULT)


class ReferenceScheduler:
    """See ``tokenspeed_scheduler.Scheduler`` for what each member promises. The fused role only (ValueError)."""

    def __init__(self, config: SchedulerConfig) -> None:
        if config.role != Role.FUSED:
            raise ValueError("role: the reference scheduler plays the fused role only; use the native one")
        self._config = config
        self._pool = Pool(config.num_parents, [group.children_per_parent for group in config.groups])
        self._rows = deque(range(1, config.max_num_seqs + 1))
        self._requests: dict[int, Request] = {}
        self._flights: deque[tuple[int, list[Row]]] = deque()
        self._round = self._forward_id = self._submitted = 0
        self._finished = self._ignored = self._retractions = 0
        self._prefill_tokens = self._decode_tokens = self._recomputed_tokens = 0
        self._flows: Counter[tuple[State, State]] = Counter()
        # Of the last round: what got a row, what found no room, and which handles were left out to make some.
        self._planned: dict[int, Row] = {}
        self._blocked: list[Request] = []
        self._gave_way: set[int] = set()
        self._time = 0.0
        self._ended: deque[ReferenceDescription] = deque(maxlen=MAX_ENDED)

    # What comes from outside.

    def set_time(self, seconds: float) -> None:
        self._time = seconds

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
        del namespace, max_cached_prefix_tokens  # of the prefix cache
        tokens = prompt.tolist()
        if handle in self._requests:
            raise ValueError(f"request {handle} is alive: a handle can be used again once its request has ended")
        if not tokens or min(tokens) < 0 or max_new_tokens < 1:
            raise ValueError(f"request {handle}: it needs a prompt, no negative token, and max_new_tokens of 1 or more")
        longest = len(tokens) + (max_new_tokens if declared else 1)
        if longest > self.max_single_request_tokens():
            raise RequestRefused(
                f"request {handle}: {len(tokens)} prompt tokens and {longest - len(tokens)} new ones are {longest}, "
                f"one request can have {self.max_single_request_tokens()}"
            )
        request = Request(handle, tokens, len(tokens), max_new_tokens, priority, place=self._submitted)
        request.since, request.arrived = self._round, self._time
        request.visits.append(Visit(request.state, self._round, self._time))
        self._submitted += 1
        self._requests[handle] = request

    def advance(self, events: Sequence[Event]) -> None:
        self._validate(events)
        for event in events:
            if isinstance(event, ForwardResult):
                self._land(event)
            elif isinstance(event, Finish | Abort):
                request = self._requests.get(event.handle)
                if request is None or request.ended:
                    self._ignored += 1
                else:
                    self._end(request)

    def _validate(self, events: Sequence[Event]) -> None:
        due = [(forward_id, len(rows)) for forward_id, rows in self._flights]
        for event in events:
            if not isinstance(event, ForwardResult) or event.forward_id not in [forward_id for forward_id, _ in due]:
                continue
            forward_id, rows = due.pop(0)
            if event.forward_id != forward_id:
                raise ValueError(f"the result of forward {event.forward_id} came before that of {forward_id}")
            if len(event.tokens) != rows or (event.failed is not None and len(event.failed) != rows):
                raise ValueError(f"forward {forward_id} has {rows} rows, its result has {len(event.tokens)}")

    def _land(self, event: ForwardResult) -> None:
        if not self._flights or self._flights[0][0] != event.forward_id:
            self._ignored += 1
            return
        _, rows = self._flights.popleft()
        failed = np.zeros(len(rows)) if event.failed is None else event.failed
        for row, token, is_failed in zip(rows, event.tokens.tolist(), failed.tolist(), strict=True):
            request = self._requests[row.handle]
            request.out -= 1
            if not request.ended:
                request.lost = request.lost or bool(is_failed) or (row.samples and token < 0)
                if row.samples and token >= 0:
                    request.tokens.append(token)
            elif request.out == 0:
                self._forget(request)

    def _end(self, request: Request) -> None:
        """Finish and Abort alike: what a forward still touches is kept until its result is here."""
        request.ended = True
        if request.out:
            self._enter(request, State.FINISHING)
        else:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._leave_row(request)
        self._enter(request, State.FINISHED)
        self._finished += 1
        self._ended.append(self._description(request, alive=False))
        del self._requests[request.handle]

    # A round.

    def plan(self) -> ReferencePlan:
        self._round += 1
        aborts = [self._abort(r, "failed", "a row of it failed") for r in self._line() if r.lost and not r.ended]
        self._planned, self._blocked, self._gave_way = {}, [], set()
        budget = self._config.max_scheduled_tokens
        if self._config.mixed_batches:
            self._prefill(self._decode(budget))
        elif self._prefill(budget) == budget:
            self._decode(budget)
        aborts += [self._outgrown(request) for request in self._blocked if self._is_alone(request)]
        rows = sorted(self._planned.values(), key=lambda row: row.kind == RowKind.DECODE)  # a stable sort
        self._forward_id += bool(rows)
        if rows:
            self._flights.append((self._forward_id, rows))
        tables = [(row.row, self._requests[row.handle].tables) for row in rows]
        return make_plan(self._forward_id if rows else 0, rows, tables, len(self._config.groups), aborts)

    def _decode(self, budget: int) -> int:
        """One token of every request that is prefilled, in line; returns what is left of ``budget``."""
        for request in self._line():
            if budget == 0:
                break
            ready = self._may_run(request) and request.is_prefilled and request.scheduled < request.max_new_tokens
            if ready and self._fits(request, 1):
                self._schedule(request, RowKind.DECODE, 1)
                budget -= 1
        return budget

    def _prefill(self, budget: int) -> int:
        """Chunks of prompts in line: of residents, then of those who wait while there is room and nobody gave way."""
        for request in sorted(self._line(), key=lambda request: request.row == 0):
            if budget == 0:
                break
            if request.is_prefilled or not self._may_run(request):
                continue
            if not request.row and not self._begin(request):
                break
            length = self._cut(request, min(budget, request.goal - request.computed))
            if self._fits(request, length):
                self._schedule(request, RowKind.PREFILL, length)
                budget -= length
            elif request.computed == 0:
                self._leave_row(request)
                break
            if request.computed < request.goal:
                break  # at most one prompt is cut, and no other begins before it is complete
        return budget

    def _may_run(self, request: Request) -> bool:
        in_flight = request.out > self._config.overlap_depth
        return not (request.ended or in_flight or request.handle in self._gave_way)

    def _begin(self, request: Request) -> bool:
        """Gives a request that waits a row and empty tables; not in a round in which a resident lacked room."""
        if self._gave_way or self._blocked or not self._rows:
            return False
        request.row = self._rows.popleft()
        request.goal, request.computed = len(request.tokens), 0
        request.tables = [make_table(group, index) for index, group in enumerate(self._config.groups)]
        return True

    def _schedule(self, request: Request, kind: RowKind, length: int) -> None:
        for table in request.tables:
            table.grow(request.computed, length, self._pool)
        known = request.tokens[request.computed : request.computed + length]
        ids = known + [-1] * (length - len(known))  # a decode's token may not have landed
        samples = request.computed + length >= request.goal
        self._planned[request.handle] = Row(
            request.handle, request.row, kind, request.computed, request.goal, samples, ids
        )
        if kind == RowKind.DECODE:
            self._enter(request, State.DECODING)
            self._decode_tokens += length
        else:
            self._enter(request, State.PREFILL_DONE if samples else State.PREFILLING)
            self._prefill_tokens += length
        request.computed += length
        request.scheduled += samples
        request.out += 1

    # Room.

    def _has_room(self, request: Request, length: int) -> bool:
        for table in request.tables:
            table.expire(request.computed, self._pool)
        return self._pool.can_take([table.lacks(request.computed, length) for table in request.tables])

    def _cut(self, request: Request, length: int) -> int:
        """Halves a chunk until it has room, as far as one token."""
        while length > 1 and not self._has_room(request, length):
            length //= 2
        return length

    def _fits(self, request: Request, length: int) -> bool:
        """Whether its next tokens have room, where need be once residents behind it in the line have given way."""
        while not self._has_room(request, length):
            behind = [r for r in self._line() if r.row and r.line_key > request.line_key and not r.ended]
            victims = [r for r in behind if r.handle not in self._planned and r.handle not in self._gave_way]
            if victims and request.computed:
                self._gave_way.add(victims[-1].handle)
            if not victims or victims[-1].out or not request.computed:
                # With a result out a victim is only left out of this round, so that the next can take it.
                self._blocked.append(request)
                return False
            self._retract(victims[-1])
        return True

    def _retract(self, request: Request) -> None:
        self._recomputed_tokens += request.computed
        self._leave_row(request)
        request.retractions += 1
        self._retractions += 1
        self._enter(request, State.SUBMITTED)

    def _leave_row(self, request: Request) -> None:
        if request.row:
            for table in request.tables:
                table.release(self._pool)
            self._rows.append(request.row)
            request.row, request.computed, request.tables = 0, 0, []

    def _is_alone(self, request: Request) -> bool:
        """Whether nobody else holds anything, and nothing of its own is out: then no room will ever come."""
        return request.out == 0 and all(r is request or not r.row for r in self._requests.values())

    def _outgrown(self, request: Request) -> tuple[int, str, str]:
        detail = (
            f"request {request.handle} has {len(request.tokens)} tokens and outgrew the pool of "
            f"{self._config.num_parents} parents; give the KV cache more memory (kv.bytes) or declare max_new_tokens"
        )
        return self._abort(request, "capacity", detail)

    def _abort(self, request: Request, reason: str, detail: str) -> tuple[int, str, str]:
        self._end(request)
        return (request.handle, reason, detail)

    # Reports.

    def snapshot(self) -> ReferenceSnapshot:
        states = np.zeros(len(State), dtype=np.int64)
        states[list(NOT_OF_THIS_ROLE)] = -1
        for request in self._requests.values():
            states[request.state] += 1
        states[State.FINISHED] = self._finished
        residents = [request for request in self._requests.values() if request.row and not request.ended]
        return ReferenceSnapshot(
            round=self._round,
            states=states,
            groups=[self._pool.counts(index, group) for index, group in enumerate(self._config.groups)],
            flows=[(int(source), int(target), count) for (source, target), count in sorted(self._flows.items())],
            running=len(residents),
            waiting=int(states[State.SUBMITTED]),
            live=len(self._requests),
            retractions=self._retractions,
            ignored_results=self._ignored,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            recomputed_tokens=self._recomputed_tokens,
        )

    def requests(self, limit: int = 200) -> list[ReferenceRow]:
        shown = sorted(self._requests.values(), key=interest)[:limit]
        return [ReferenceRow.of(request, self._round, self.explain(request.handle).text) for request in shown]

    def describe(self, handle: int) -> ReferenceDescription:
        if handle in self._requests:
            return self._description(self._requests[handle], alive=True)
        for ended in reversed(self._ended):
            if ended.row.handle == handle:
                return ended
        unknown = Request(handle, [], 0, 0, 0, 0, State.FINISHED, visits=[Visit(State.FINISHED, 0, 0.0)])
        return ReferenceDescription(False, ReferenceRow.of(unknown, 0, ""), [], 0, [])

    def _description(self, request: Request, *, alive: bool) -> ReferenceDescription:
        why = self.explain(request.handle).text if alive else ""
        lines = [why or "it runs"] if alive else []
        row = ReferenceRow.of(request, self._round, why)
        return ReferenceDescription(alive, row, list(request.visits), request.visits_omitted, lines)

    def maps(self, cells: int = 256) -> ReferenceMaps:
        """Nothing: the twin draws no picture of its pool."""
        del cells
        return ReferenceMaps([""] * len(self._config.groups))

    def headroom(self, typical_tokens: int = 0) -> ReferenceHeadroom:
        empty = [make_table(group, index) for index, group in enumerate(self._config.groups)]
        counts = [self._pool.counts(index, group) for index, group in enumerate(self._config.groups)]
        full = [
            count.free * group.block_granularity
            for count, group in zip(counts, self._config.groups, strict=True)
            if group.kind == "full_history"
        ]
        return measured_headroom(
            lambda tokens, copies: self._pool.can_take([copies * table.lacks(0, tokens) for table in empty]),
            rows=len(self._rows),
            bound=self.max_single_request_tokens(),
            tokens=min(full, default=0),
            live=[len(request.tokens) for request in self._requests.values()],
            typical=typical_tokens,
        )

    def take_notes(self) -> list[object]:
        """Nothing: the twin keeps no records."""
        return []

    def explain(self, handle: int) -> ReferenceExplanation:
        request = self._requests.get(handle)
        if request is None:
            return ReferenceExplanation(handle, State.FINISHED, "ended", "it is not alive")
        return ReferenceExplanation(handle, request.state, *self._why(request))

    def _why(self, request: Request) -> tuple[str, str]:
        if request.ended:
            return "ending", "it ended, and a forward that touches its blocks is out"
        if request.handle in self._planned:
            return "running", ""
        if request.scheduled >= request.max_new_tokens:
            return "generation_done", "all its tokens are scheduled"
        if request in self._blocked:
            return "capacity", "its next tokens have no room"
        if request.handle in self._gave_way:
            return ("armed" if request.row else "retracted"), "it gave way to a request before it in the line"
        return "queued", "it waits for its turn in the line"

    def decisions(self, last: int = 64) -> list[object]:
        """Nothing: the twin keeps no records."""
        del last
        return []

    def has_work(self) -> bool:
        return bool(self._requests)

    def max_single_request_tokens(self) -> int:
        return single_request_bound(self._config)

    def check_invariants(self) -> None:
        tables: Iterator[Table] = (table for request in self._requests.values() for table in request.tables)
        held = [(table.index, block) for table in tables for block in table.held()]
        taken = [request.row for request in self._requests.values() if request.row]
        rules: dict[str, Callable[[], bool]] = {
            "a block has one holder and the pool knows it": lambda: sorted(held) == sorted(self._pool.taken()),
            "a row has one holder": lambda: (
                sorted([*taken, *self._rows]) == list(range(1, self._config.max_num_seqs + 1))
            ),
            "who has a row, and only who has one, may hold blocks and have results out": lambda: all(
                bool(request.tables) == bool(request.row) >= bool(request.out) for request in self._requests.values()
            ),
        }
        for rule, holds in rules.items():
            if not holds():
                raise RuntimeError(f"an invariant is broken in round {self._round}: {rule}")

    def _line(self) -> list[Request]:
        return sorted(self._requests.values(), key=lambda request: request.line_key)

    def _enter(self, request: Request, state: State) -> None:
        if request.state != state:
            self._flows[request.state, state] += 1
            request.state, request.since = state, self._round
            if len(request.visits) == MAX_VISITS:
                del request.visits[0]
                request.visits_omitted += 1
            request.visits.append(Visit(state, self._round, self._time))
