"""Plays an engine against the scheduler: executes every plan on a model of the KV cache and holds it to its contract.

Nothing here knows how the scheduler decides; it knows what a plan may never do: read what was not written, show one
request another's tokens, exceed the budget, plan for the dead, sample more than was asked.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from block_tables import ReplayedTables
from engine_settings import Settings
from kv_model import KvCells, PlayedRequest, chain_keys
from plan_checks import check_arrays, check_shape, same_plan

from tokenspeed_scheduler import Abort, Event, Finish, ForwardResult, Plan, PlanAbort, RowKind, Scheduler, State

WITHOUT_BLOCKS = (State.SUBMITTED, State.RETRACTED)
STALLED_ROUNDS = 4
"""So many rounds in a row with live requests, nothing out and nothing planned are a stall."""


@dataclass(frozen=True)
class Flight:
    """A plan that is out.

    Per row its handle and the token it sampled (-1: none); ``blocks`` of the pages that it may complete.
    """

    forward_id: int
    handles: list[int]
    tokens: list[int]
    blocks: int


class Engine:
    """A scheduler and the engine around it; ``settings`` are those of Settings.

    ``twin=True`` feeds a second scheduler the same and compares every plan.
    """

    def __init__(self, *, twin: bool = False, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.overlap = self.settings.overlap
        self.scheduler = Scheduler(self.settings.config())
        self.twin = Scheduler(self.settings.config()) if twin else None
        self.requests: dict[int, PlayedRequest] = {}
        self.done: dict[int, PlayedRequest] = {}
        self.tables = ReplayedTables()
        self.cells = KvCells(self.settings.granularity)
        self.flights: deque[Flight] = deque()
        self.retired: set[int] = set()
        self.last_forward_id = 0
        self.submitted = 0
        self.landed_blocks = 0  # of the pages that the forward which landed last may have completed
        self.last_rows: set[int] = set()  # of the last plan
        self.told = True  # nothing happened since the last plan told its deltas

    # What the frontend does.

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 8,
        *,
        declared: bool = True,
        priority: int = 0,
        namespace: bytes = b"",
        max_cached: int = -1,
        choice: int = 0,
    ) -> int:
        """Submits a request under the next free handle and returns the handle."""
        handle = self.submitted + 1
        for scheduler in self._schedulers():
            scheduler.submit(
                handle,
                np.asarray(prompt, dtype=np.int32),
                max_new_tokens=max_new_tokens,
                declared=declared,
                priority=priority,
                namespace=namespace,
                max_cached_prefix_tokens=max_cached,
            )
        self.submitted = handle
        tokens = list(prompt)
        self.requests[handle] = PlayedRequest(
            handle, list(prompt), max_new_tokens, namespace, choice, max_cached, tokens, chain_keys(namespace, tokens)
        )
        return handle

    def finish(self, *handles: int) -> None:
        """The frontend found an end (a stop string): Finish for each of ``handles`` in one batch."""
        self.advance([Finish(handle) for handle in handles])

    def abort(self, *handles: int) -> None:
        self.advance([Abort(handle) for handle in handles])

    def advance(self, events: Sequence[Event]) -> None:
        """Hands a batch of events to the scheduler; the model must have been told of results by ``land``."""
        self.told = self.told and not events
        for scheduler in self._schedulers():
            scheduler.advance(events)
        for event in events:
            if isinstance(event, (Finish, Abort)):
                self._end(event.handle)
        self._release()

    # What the loop does.

    def plan(self, *, may_abort: bool = False) -> Plan:
        """Plans a round, executes it on the model and holds it to its contract; aborts only where they ``may`` be."""
        assert len(self.flights) <= self.overlap, "the test planned with too many results out"
        plan = self.scheduler.plan()
        if self.twin is not None:
            same_plan(plan, self.twin.plan())
        check_shape(plan)
        check_arrays(plan)
        self._drop_retracted()
        assert may_abort or not plan.aborts, [(abort.handle, abort.detail) for abort in plan.aborts]
        for abort in plan.aborts:
            self._end(abort.handle)
        self._release()
        self._begin_rows(plan)
        self.tables.apply(plan.tables[0])
        self._check_rows(plan)
        self._check_sharing(plan)
        self._execute(plan)
        self.told = True
        self.last_rows = set(plan.row.tolist())
        return plan

    def land(self, failed: Collection[int] = (), *, finish: bool = True, events: Sequence[Event] = ()) -> None:
        """Lands the oldest result. Rows of ``failed`` handles fail and are aborted in the same batch; ``finish`` ends
        requests that reached max_new_tokens, as the loop does; ``events`` go into the same batch."""
        flight = self.flights.popleft()
        self.landed_blocks = flight.blocks
        tokens = np.asarray(flight.tokens, dtype=np.int32)
        broken = np.asarray([handle in failed for handle in flight.handles], dtype=np.uint8)
        tokens[broken == 1] = -1
        batch: list[Event] = [ForwardResult(flight.forward_id, tokens, broken if broken.any() else None)]
        self.cells.landed.add(flight.forward_id)
        for handle, token in zip(flight.handles, tokens.tolist(), strict=True):
            request = self.requests[handle]
            request.out -= 1
            if handle in failed:
                self._poison(flight.forward_id, request)
                batch.append(Abort(handle))
            elif token >= 0 and not request.ended:
                request.landed += 1
                if finish and request.landed == request.max_new_tokens:
                    batch.append(Finish(handle))
        self.advance([*batch, *events])

    def round(self, failed: Collection[int] = ()) -> Plan:
        """One round of the loop: plan, then land what is due."""
        plan = self.plan()
        keep = self.overlap if plan.num_rows else 0
        while len(self.flights) > keep:
            self.land(failed)
        return plan

    def until_aborted(self, limit: int = 500) -> list[PlanAbort]:
        """Makes rounds until the scheduler ends a request by itself."""
        for _ in range(limit):
            plan = self.plan(may_abort=True)
            if plan.aborts:
                return list(plan.aborts)
            while len(self.flights) > (self.overlap if plan.num_rows else 0):
                self.land()
            self.check()
        raise AssertionError("the scheduler aborted nobody")

    def rounds(self, count: int) -> list[Plan]:
        return [self.round() for _ in range(count)]

    def land_all(self) -> None:
        while self.flights:
            self.land()

    def run(self, limit: int = 2000, *, check: bool = True) -> int:
        """Makes rounds until nothing lives and returns how many it took; fails on a stall and beyond ``limit``."""
        self.finish(*(request.handle for request in self.requests.values() if self._is_complete(request)))
        while len(self.flights) > self.overlap:
            self.land()
        idle = 0
        for count in range(limit):
            if not self.requests:
                return count
            planned = self.round().num_rows
            idle = 0 if planned or self.flights else idle + 1
            reasons = [(row.handle, row.state.name, row.reason) for row in self.scheduler.requests()]
            assert idle < STALLED_ROUNDS, f"stalled: {reasons}"
            if check:
                self.check()
        raise AssertionError(f"still busy after {limit} rounds: {self.scheduler.requests()}")

    # What a test asks.

    def states(self) -> dict[int, State]:
        """The state of every live request."""
        return {row.handle: State(row.state) for row in self.scheduler.requests(1 << 20)}

    def state(self, handle: int) -> State | None:
        """The state of one request, None where it is not alive."""
        return self.states().get(handle)

    def retracted(self) -> list[int]:
        """Those that were retracted and wait, the oldest first."""
        rows = self.scheduler.requests(1 << 20)
        return [row.handle for row in rows if row.retractions and row.state in WITHOUT_BLOCKS]

    def count(self, state: State) -> int:
        return int(self.scheduler.snapshot().states[state])

    def group(self) -> tuple[int, int, int]:
        """Blocks held, cached and free."""
        (group,) = self.scheduler.snapshot().groups
        return group.held, group.cached, group.free

    def table(self, handle: int) -> list[int]:
        return list(self.tables.tables[self.requests[handle].row])

    def cached(self, handle: int) -> int:
        """The prefix a request was given when it began (the last time)."""
        request = self.requests.get(handle) or self.done[handle]
        return request.cached_at_starts[-1]

    def check(self) -> None:
        """The scheduler's own walk, and its counts against the model's."""
        for scheduler in self._schedulers():
            scheduler.check_invariants()
        snapshot = self.scheduler.snapshot()
        (group,) = snapshot.groups
        assert group.total == self.settings.num_blocks
        assert group.held + group.cached + group.free == group.total
        assert min(group.held, group.cached, group.free) >= 0
        assert group.pinned <= group.held + group.cached
        self._drop_retracted()
        self._check_held(group.held)
        assert snapshot.live == len(self.requests)
        assert self.scheduler.has_work() == bool(self.requests)
        self._check_request_rows()

    def assert_whole(self) -> None:
        """Nothing lives and every block is free or cached."""
        self.check()
        assert not self.requests
        assert not self.scheduler.has_work()
        assert self.group()[0] == 0

    # The model.

    def _schedulers(self) -> list[Scheduler]:
        return [self.scheduler] if self.twin is None else [self.scheduler, self.twin]

    def _is_complete(self, request: PlayedRequest) -> bool:
        return not request.ended and request.landed == request.max_new_tokens

    def _end(self, handle: int) -> None:
        if handle in self.requests:
            self.requests[handle].ended = True

    def _release(self) -> None:
        """Requests that ended and have nothing out give their row back."""
        for handle in [h for h, request in self.requests.items() if request.ended and request.out == 0]:
            request = self.requests.pop(handle)
            self.done[handle] = request
            self._leave_row(request)

    def _leave_row(self, request: PlayedRequest) -> None:
        if request.row:
            self.tables.end(request.row)
            request.row = request.computed = request.goal = 0

    def _drop_retracted(self) -> None:
        """Requests that the scheduler shows without a bundle have left their rows, with nothing out."""
        for handle, state in self.states().items():
            request = self.requests[handle]
            if state in WITHOUT_BLOCKS and request.row:
                assert request.out == 0, f"request {handle} was retracted with a forward out"
                self._leave_row(request)

    def _poison(self, forward_id: int, request: PlayedRequest) -> None:
        """A failed row's tokens are worth nothing, nor is what a forward behind it made of them."""
        self.cells.fail(forward_id, request.handle)
        for flight in self.flights:
            self.cells.fail(flight.forward_id, request.handle)

    def _begin_rows(self, plan: Plan) -> None:
        for index in plan.starts.tolist():
            request = self.requests[int(plan.handle[index])]
            row, prefix = int(plan.row[index]), int(plan.prefix_len[index])
            assert plan.kind[index] == RowKind.PREFILL
            if request.row:  # taken and let in again within one plan
                assert request.out == 0, f"request {request.handle} began anew with a forward out"
                self._leave_row(request)
            assert row not in self.tables.tables, f"row {row} is taken"
            self.tables.begin(row)
            request.row, request.computed = row, prefix
            request.goal = len(request.prompt) + request.landed
            request.cached_at_starts.append(prefix)
            assert request.goal == len(request.tokens)
            assert prefix % self.settings.page == 0, "a hit comes in whole prefix pages"
            assert prefix < request.goal, "the last token is always computed"
            assert request.max_cached < 0 or prefix <= request.max_cached

    def _check_rows(self, plan: Plan) -> None:
        handles = plan.handle.tolist()
        assert int(plan.input_len.sum()) <= self.settings.budget
        assert len(set(handles)) == len(handles) <= self.settings.max_num_seqs
        kinds = set(plan.kind.tolist())
        assert self.settings.mixed or len(kinds) <= 1, "a batch that may not be mixed"
        starts = set(plan.starts.tolist())
        offset = 0
        for index, handle in enumerate(handles):
            request = self.requests[handle]
            length = int(plan.input_len[index])
            assert not request.ended, f"a row for request {handle}, which ended"
            assert request.row == plan.row[index]
            assert 1 <= request.row <= self.settings.max_num_seqs
            assert plan.prompt_len[index] == request.goal
            assert plan.prefix_len[index] == request.computed
            ids = plan.input_ids[offset : offset + length].tolist()
            offset += length
            self._check_input(plan, index, request, ids)
            self._check_reads(request, length, begins=index in starts)

    def _check_input(self, plan: Plan, index: int, request: PlayedRequest, ids: list[int]) -> None:
        first = request.computed
        if plan.kind[index] == RowKind.DECODE:
            assert len(ids) == 1
            assert first == len(request.tokens) - 1 >= request.goal
            assert plan.samples[index] == 1
            known = request.samples == request.landed
            assert ids[0] == -1 or (known and ids[0] == request.tokens[-1])
        else:
            assert first + len(ids) <= request.goal
            assert ids == request.tokens[first : first + len(ids)]
            assert plan.samples[index] == (first + len(ids) == request.goal)
        assert request.samples + int(plan.samples[index]) <= request.max_new_tokens, "more than was asked"

    def _check_reads(self, request: PlayedRequest, length: int, *, begins: bool) -> None:
        table = self.tables.tables[request.row]
        end = request.computed + length
        assert len(table) * self.settings.granularity >= end, "no block for a token that is computed"
        readable = self.cells.publishable if begins else self.cells.holds
        for position in range(request.computed):
            assert readable(table, position, request.keys[position]), (
                f"request {request.handle} reads a wrong token at {position} of its {end} (begins: {begins})"
            )

    def _check_sharing(self, plan: Plan) -> None:
        """A block in two tables is a published page: same slot, same tokens, landed, and nobody writes to it.

        The table of a row that is not in the plan may be behind: where a page of it was found to be a duplicate, the
        delta that says so comes with its next row, and the block may be another's already.
        """
        by_row = {request.row: request for request in self.requests.values() if request.row}
        planned = set(plan.row.tolist())
        size = self.settings.granularity
        for block, places in self.tables.shared():
            ends = {row: (slot + 1) * size for row, slot in places}
            writers = [row for row, end in ends.items() if by_row[row].computed < end]
            assert len(writers) <= 1, f"block {block} is filled by requests {[by_row[row].handle for row in writers]}"
            readers = [row for row in ends if row in planned and row not in writers]
            assert not (writers and readers), f"block {block} is read while another request fills it"
            assert len({ends[row] for row in readers}) <= 1, f"block {block} is two different pages"
            for row in readers if len(readers) > 1 else []:
                for position in range(ends[row] - size, ends[row]):
                    assert self.cells.publishable(self.tables.tables[row], position, by_row[row].keys[position])

    def _execute(self, plan: Plan) -> None:
        if plan.num_rows == 0:
            assert plan.forward_id == 0
            return
        assert plan.forward_id == self.last_forward_id + 1
        self.last_forward_id = plan.forward_id
        sampled = []
        for index, handle in enumerate(plan.handle.tolist()):
            request = self.requests[handle]
            table = self.tables.tables[request.row]
            end = request.computed + int(plan.input_len[index])
            for position in range(request.computed, end):
                block = table[position // self.settings.granularity]
                self.cells.write(block, position, request.keys[position], plan.forward_id, handle)
            request.computed = end
            request.out += 1
            token = -1
            if plan.samples[index]:
                token = request.sample()
                request.append(token)
                request.samples += 1
            sampled.append(token)
        pages = int((plan.input_len // self.settings.page + 1).sum())
        blocks = pages * (self.settings.page // self.settings.granularity)
        self.flights.append(Flight(plan.forward_id, plan.handle.tolist(), sampled, blocks))

    def _check_held(self, held: int) -> None:
        """What the scheduler holds stands in tables, but for duplicates of published pages.

        Where a landed result made a duplicate, the row's next delta tells of it; the duplicate itself stays for as
        long as a forward that reads it is out.
        """
        if self.told:
            assert held >= self.tables.held(self.last_rows)
        if self.last_rows >= self.tables.tables.keys():
            assert held <= self.tables.held() + self.landed_blocks
            assert held == self.tables.held() or not self.told or self.overlap

    def _check_request_rows(self) -> None:
        for row in self.scheduler.requests(1 << 20):
            request = self.requests[row.handle]
            assert row.generated_tokens == request.landed or request.ended
            assert row.prompt_tokens == len(request.prompt)
            assert (row.state == State.FINISHING) == request.ended
            assert (row.state in WITHOUT_BLOCKS) == (request.row == 0)
            assert row.blocks == (len(self.tables.tables[request.row]) if request.row else 0)
