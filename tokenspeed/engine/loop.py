"""The event loop: receive, advance, plan, execute, commit what is due, advance, publish. It only sequences.

The scheduler is advanced at two places: at the head of a round with what came from outside (the frontend's words, and
storage operations that ended, so that admission sees them) and at its tail with what the steps that landed brought.
Whether the next step is planned before the last one's result is known (``overlap`` 1) or after (0) changes no token.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenspeed.device.handle import DeviceHandle, Grammar, OperationOutcome, PendingStep, RowStart, StepFailed
from tokenspeed.engine.commit import Commit, commit_failure, commit_result
from tokenspeed.engine.held import GrammarCompiler, HeldRequests
from tokenspeed.engine.orders import Orders
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.engine.snapshots import Moment
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.engine.telemetry import LEFT, Telemetry
from tokenspeed.messages import (
    PROTOCOL_VERSION,
    ConstraintError,
    EngineInput,
    EngineMessage,
    EngineOutput,
    RequestOutput,
    Submit,
)
from tokenspeed.messages.snapshot import EventKind
from tokenspeed_scheduler import (
    Abort,
    Event,
    Finish,
    ForwardResult,
    OperationDone,
    OperationKind,
    Plan,
    RequestRefused,
    Scheduler,
    Tick,
)

logger = logging.getLogger(__name__)

IDLE_WAIT_MS = 1000
BLOCKED_WAIT_MS = 5
"""Between two tries of a scheduler that planned nothing and waits for nothing on the device, but has work or waits for
a storage operation, and between two looks at a constraint that is being compiled."""

STORAGE_KINDS = frozenset((OperationKind.STORAGE_QUERY, OperationKind.STORAGE_FETCH, OperationKind.STORAGE_PUT))
"""Operations that run beside the steps and are told at the head of a round; all others end with their step."""

MAX_FAILED_STEPS = 3
"""So many steps in a row whose forward raised end the engine: what fails every time is not one request's fault."""


class EngineFailure(RuntimeError):
    """The engine cannot go on; the supervisor starts another."""


class PeerLost(EngineFailure):
    """The same, because another rank is gone: that one's end is the cause."""


class Channel(Protocol):
    """The loop's view of the wire; see EngineChannel."""

    def receive(self, timeout_ms: int) -> list[EngineInput]: ...

    def send(self, message: EngineMessage) -> None: ...


@dataclass(frozen=True)
class _InFlight:
    plan: Plan
    step: PendingStep


class EventLoop:
    """One engine rank's control plane. One thread runs it; it holds no reference to anything on a device.

    Args:
        scheduler: the C++ state machine.
        handle: the only door to the device.
        channel: the wire to the frontend.
        statistics: counts what happens and builds the snapshots.
        max_model_len: prompt plus output of one request.
        overlap: results that may be out when the next step is planned.
        storage: whether the scheduler plans storage operations, whose timeouts want to know the time (milliseconds).
        grammars: compiles the rules of answers beside the loop; None refuses requests that have any.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        handle: DeviceHandle,
        channel: Channel,
        statistics: EngineStatistics,
        max_model_len: int,
        overlap: int,
        storage: bool,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._handle = handle
        self._channel = channel
        self._statistics = statistics
        self._max_model_len = max_model_len
        self._overlap = overlap
        self._storage = storage
        self._held = HeldRequests(grammars)
        self._clock = clock
        self._live: dict[int, LiveRequest] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._storage_out: set[int] = set()
        self._orders = Orders()
        self._telemetry = Telemetry(scheduler, statistics, self._live)
        self._outputs: list[RequestOutput] = []
        self._failed_in_a_row = 0
        self._round = 0
        self._draining = False
        self._blocked = True

    def run(self) -> None:
        """Runs until drained, what is to be stored included. Raises EngineFailure where the engine cannot go on."""
        while not (self._draining and not self._live and not self._held and self._is_idle()):
            self.round()
        self._publish()

    def round(self) -> None:
        """One round; waits for input only where there is nothing else to do."""
        events = [*self._receive(), *self._storage_events()]
        self._scheduler.advance(events)
        started = planned = self._clock()
        has_rows = False
        if self._orders.paused:
            self._blocked = True
        else:
            plan = self._scheduler.plan()
            planned = self._clock()
            has_rows = self._execute(plan)
        commits = self._commit_due(has_rows)
        self._blocked = self._blocked and not commits  # what landed may have made room
        committing = self._clock()
        self._telemetry.stamp()
        self._scheduler.advance(commits)
        self._publish()
        self._statistics.round_ended(planned - started, self._clock() - committing)

    # Head of a round: what came from outside.

    def _receive(self) -> list[Event]:
        wait_ms = self._patience_ms()
        if wait_ms == IDLE_WAIT_MS:
            self.publish_snapshot()
        events: list[Event] = []
        messages = self._channel.receive(wait_ms)
        self._telemetry.stamp()  # after the wait: what came, came now
        for message in messages:
            for submit in message.submits:
                if self._draining:
                    self._refuse(submit, "draining", "the engine is shutting down and takes no new work")
                elif not self._held.hold(submit, self._telemetry.now()):
                    self._submit(submit)
            for finish in message.finishes:
                if self._let_go(finish.handle, "stop"):
                    self._statistics.finished += 1
                    events.append(Finish(finish.handle))
            events += self._aborts(message.aborts)
            for order in message.orders:
                self._orders.take(order)
                self._blocked = False
            self._telemetry.take(message)
            if message.drain:
                self._draining, self._orders.paused = True, False
        for submit, grammar in self._held.released():
            self._submit(submit, grammar)
        idle = not (self._in_flight or self._storage_out or self._scheduler.has_work())
        return [*events, *self._orders.events(len(self._live) + len(self._held), idle)]

    def _aborts(self, handles: list[int]) -> list[Event]:
        """What became of requests whose clients left: those that the scheduler has are its own to end."""
        known = [handle for handle in handles if self._let_go(handle, "abort", LEFT)]
        held = [handle for handle in handles if self._held.drop(handle)]
        self._statistics.aborted += len(known) + len(held)
        return [Abort(handle) for handle in known]

    def _storage_events(self) -> list[Event]:
        """The storage operations that ended, and the time, by which the scheduler gives up on those that did not."""
        if not self._storage:
            return []
        events: list[Event] = [Tick(int(self._clock() * 1000))]
        finished = self._handle.finished_operations()
        self._storage_out.difference_update(outcome.op_id for outcome in finished)
        return [*events, *_operations_done(finished)]

    def _patience_ms(self) -> int:
        """How long this round may wait for input: not at all while a step is out or one can be planned."""
        if self._in_flight or not self._blocked or self._orders.waiting:
            return 0
        if self._orders.paused and not (self._storage_out or self._held):
            return IDLE_WAIT_MS
        waits = self._scheduler.has_work() or self._storage_out or self._held
        return BLOCKED_WAIT_MS if waits else IDLE_WAIT_MS

    def _is_idle(self) -> bool:
        """Whether nothing is out and the last round planned nothing and learned nothing."""
        return self._blocked and not self._in_flight and not self._storage_out

    def _submit(self, submit: Submit, grammar: Grammar | ConstraintError | None = None) -> None:
        if isinstance(grammar, ConstraintError):
            self._refuse(submit, grammar.code, str(grammar))
            return
        try:
            request = LiveRequest.of(submit, self._max_model_len, grammar)
            self._scheduler.submit(
                submit.handle,
                request.prompt,
                max_new_tokens=max(request.limit, 1),
                declared=submit.declared,
                priority=submit.priority,
                namespace=submit.namespace,
                max_cached_prefix_tokens=0 if request.needs_whole_prompt else -1,
            )
        except RequestRefused as error:
            self._refuse(submit, "context_length_exceeded", str(error))
        except ValueError as error:
            self._refuse(submit, "invalid_request", str(error))
        else:
            request.submitted_at = self._clock()
            self._live[submit.handle] = request
            logger.debug(
                "request %d of %d prompt tokens",
                submit.handle,
                len(request.prompt),
                extra={"request_id": submit.request_id},
            )

    def _refuse(self, submit: Submit, code: str, text: str) -> None:
        self._telemetry.ended(submit, "error", text, None)
        self._outputs.append(RequestOutput(handle=submit.handle, finish_reason="error", error=text, error_code=code))

    # The step.

    def _execute(self, plan: Plan) -> bool:
        """Hands the plan to the device; returns whether it has rows."""
        for abort in plan.aborts:
            if self._let_go(abort.handle, "abort", abort.detail):
                self._outputs.append(
                    RequestOutput(
                        handle=abort.handle, finish_reason="abort", error=abort.detail, error_code=abort.reason
                    )
                )
        operations = plan.operations
        self._blocked = not (plan.num_rows or operations or any(delta.row.size for delta in plan.tables))
        if self._blocked:
            return False
        self._storage_out.update(operation.op_id for operation in operations if operation.kind in STORAGE_KINDS)
        if plan.num_rows:
            self._statistics.step_started(plan)
        self._in_flight.append(_InFlight(plan, self._handle.execute(plan, self._starts(plan))))
        return plan.num_rows > 0

    def _starts(self, plan: Plan) -> Sequence[RowStart]:
        starts = []
        now = self._clock()
        for index in plan.starts.tolist():
            request = self._live[int(plan.handle[index])]
            if request.started_at < 0:
                request.started_at = now
            starts.append(request.start(int(plan.row[index]), int(plan.prefix_len[index])))
        return starts

    # Tail of a round: the results that are due.

    def _commit_due(self, planned: bool) -> list[Event]:
        """Commits the oldest results until no more are out than may be; a round that planned no row commits all."""
        events: list[Event] = []
        keep = self._overlap if planned else 0
        while len(self._in_flight) > keep:
            events.extend(self._commit(self._in_flight.popleft()))
        return events

    def _commit(self, flight: _InFlight) -> list[Event]:
        plan = flight.plan
        try:
            result = flight.step.result()
        except StepFailed as error:
            commit = commit_failure(plan.handle, error.__cause__ or error, self._live)
            outcomes: Sequence[OperationOutcome] = _failed_copies(plan)
            self._count_failure(error)
        else:
            commit = commit_result(plan.handle, result, self._live, _lost_loads(plan, result.operations))
            outcomes = result.operations
            self._failed_in_a_row = 0
            if plan.num_rows:
                self._statistics.step_landed(result.timings)
        self._statistics.nan_rows += commit.nan_rows
        self._outputs.extend(commit.outputs)
        self._statistics.failed_copies += sum(outcome.succeeded is not None for outcome in outcomes)
        return [*_operations_done(outcomes), *self._events(plan, commit)]

    def _events(self, plan: Plan, commit: Commit) -> list[Event]:
        events: list[Event] = []
        if plan.num_rows:
            failed = commit.failed if np.any(commit.failed) else None
            events.append(ForwardResult(plan.forward_id, commit.tokens, failed))
        ended = commit.finished or commit.aborted
        ends = {output.handle: output for output in commit.outputs} if ended else {}
        for handle in commit.finished:
            self._let_go(handle, ends[handle].finish_reason or "stop")
            self._statistics.finished += 1
            events.append(Finish(handle))
        for handle in commit.aborted:
            kind: EventKind = "nan" if ends[handle].error_code == "nan_logits" else "abort"
            self._let_go(handle, "error", ends[handle].error, kind)
            self._statistics.aborted += 1
            events.append(Abort(handle))
        return events

    def _let_go(self, handle: int, reason: str, error: str = "", kind: EventKind = "abort") -> bool:
        """Forgets a live request; returns whether there was one."""
        request = self._live.pop(handle, None)
        if request is None:
            return False
        self._telemetry.ended(request.submit, reason, error, kind)
        return True

    def _count_failure(self, error: StepFailed) -> None:
        self._failed_in_a_row += 1
        self._statistics.failed_steps += 1
        logger.error("a forward raised (%d in a row)", self._failed_in_a_row, exc_info=error)
        self._telemetry.events.add("failed_step", f"a step of the model failed: {error.__cause__ or error}")
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            self.publish_snapshot()  # the last: what happened is known after the end
            raise EngineFailure(f"{MAX_FAILED_STEPS} steps in a row failed, the last with: {error.__cause__ or error}")

    def _publish(self) -> None:
        self._round += 1
        if self._outputs:
            self._channel.send(EngineOutput(version=PROTOCOL_VERSION, round=self._round, outputs=self._outputs))
            self._outputs = []
        answers: list[EngineMessage] = [*self._orders.answers()]
        answers += self._telemetry.answers(self._held, self._orders.paused)
        for answer in answers:
            self._channel.send(answer)
        if self._statistics.snapshot_is_due():
            self.publish_snapshot()

    def publish_snapshot(self) -> None:
        """Sends the state as it is now."""
        moment = Moment(
            live=self._live,
            held=self._held.waiting(),
            held_count=len(self._held),
            paused=self._orders.paused,
            storage=self._handle.storage_usage() if self._storage else None,
            storage_pending=len(self._storage_out),
        )
        self._channel.send(self._telemetry.snapshot(moment))


def _operations_done(outcomes: Sequence[OperationOutcome]) -> list[Event]:
    return [OperationDone(outcome.op_id, outcome.succeeded) for outcome in outcomes]


def _failed_copies(plan: Plan) -> list[OperationOutcome]:
    """The copies of a plan whose step failed: whether they were made is not known, so none was."""
    return [
        OperationOutcome(op_id=operation.op_id, succeeded=np.zeros(operation.group.size, np.uint8))
        for operation in plan.operations
        if operation.kind not in STORAGE_KINDS
    ]


def _lost_loads(plan: Plan, outcomes: Sequence[OperationOutcome]) -> set[int]:
    """The requests for which this plan was to bring blocks from the host and did not: their rows read nonsense."""
    failed = {outcome.op_id for outcome in outcomes if outcome.succeeded is not None}
    if not failed:
        return set()
    return {
        operation.handle
        for operation in plan.operations
        if operation.op_id in failed and operation.kind in (OperationKind.LOAD_BACK, OperationKind.RESTORE)
    }
