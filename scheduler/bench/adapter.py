"""Puts this scheduler behind the members that a scheduler micro-benchmark asks for, and reads all that a runtime reads.

A benchmark of this kind plays the engine's loop without a device and times the calls: submit, plan, read, advance. It
loads this file as ``adapter.py:TokenSpeed`` and puts its own class for one step, ``StepView`` (rows, acks, aborted,
tokens), into this module before the file runs. What only translates between its words and ours (its request ids and our
handles, its results and our events) happens outside the calls it times.
"""

import importlib.metadata
import time
from argparse import Namespace
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenspeed_scheduler import (
    CacheGroup,
    Event,
    Finish,
    ForwardResult,
    OperationDone,
    OperationKind,
    Plan,
    Scheduler,
    SchedulerConfig,
    State,
)

WINDOW_PAGES = 8
WAITING = (State.SUBMITTED, State.PREFETCHING)
RETRACTED = (State.RETRACTED, State.RESTORING)
KIND_NAMES = {int(kind): kind.name.lower() for kind in OperationKind}


class TokenSpeed:
    """The scheduler of this project.

    Args:
        a: the benchmark's options: n, page, budget, overlap, mixed, prompt, out, groups, snapshot, host, clock.
        device_pages: blocks of the device pool.
    """

    name = "tokenspeed-appliance-scheduler"

    def __init__(self, a: Namespace, device_pages: int) -> None:
        self.version = importlib.metadata.version(self.name)
        self.overlap = a.overlap
        # The rest of the context, as a server has it for a request that declares no length.
        self.max_model_len = 2 * (a.prompt[1] + a.out)
        self.now = time.perf_counter_ns if a.clock == "wall" else time.thread_time_ns
        # As an engine before it is ready, one request goes through a scheduler of its own: first calls import and bind.
        self._begin(scheduler_config(a, 64, self.max_model_len))
        self.submit([("warm-up", [1] * a.page, a.out)])
        view = self.read(self.plan())
        self.last_has_rows = False
        self.advance([("warm-up", [7])] if view.rows else [], ["warm-up"], [])
        self._begin(scheduler_config(a, device_pages, self.max_model_len))

    def _begin(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.request_ids: list[str] = []
        self.handles: dict[str, int] = {}
        self.decode_rows: list[tuple[str, str, int]] = []
        self.flights: deque[Flight] = deque()
        self.last_has_rows = False

    def submit(self, requests: list[tuple[str, list[int], int]]) -> int:
        """Submits (id, prompt, declared output or 0); returns the nanoseconds inside the scheduler."""
        calls = []
        for request_id, tokens, declared in requests:
            handle = len(self.request_ids)
            self.request_ids.append(request_id)
            self.handles[request_id] = handle
            self.decode_rows.append((request_id, "decode", 1))
            new = declared or self.max_model_len - len(tokens)
            calls.append((handle, np.array(tokens, dtype=np.int32), new, declared > 0))
        started = self.now()
        for handle, prompt, new, is_declared in calls:
            self.scheduler.submit(handle, prompt, max_new_tokens=new, declared=is_declared)
        return self.now() - started

    def plan(self) -> Plan:
        return self.scheduler.plan()

    def read(self, plan: Plan) -> Any:
        """Touches every array of the plan and says in the benchmark's words what is in it."""
        view = StepView()  # noqa: F821  # put into this module by the benchmark
        handles = plan.handle.tolist()
        _ = (plan.row, plan.prefix_len, plan.prompt_len, plan.input_ids, plan.starts)
        if handles:
            lengths = plan.input_len
            view.tokens = int(lengths.sum())
            first_decode = int(np.count_nonzero(plan.kind == 0))
            if first_decode:
                samples, sizes = plan.samples[:first_decode].tolist(), lengths[:first_decode].tolist()
                ids = map(self.request_ids.__getitem__, handles[:first_decode])
                view.rows = [(i, "last" if s else "chunk", n) for i, s, n in zip(ids, samples, sizes, strict=True)]
            # A decode row's triple is always the same: it is made once a request.
            view.rows += map(self.decode_rows.__getitem__, handles[first_decode:])
        for delta in plan.tables:
            _ = (delta.row, delta.first_slot, delta.count, delta.version_from, delta.version_to, delta.ids)
        _ = (plan.zero_blocks, plan.copy_blocks)
        for operation in plan.operations:
            _ = (operation.group, operation.source, operation.target, operation.handle)
            view.acks.append((KIND_NAMES[int(operation.kind)], operation.op_id))
        for abort in plan.aborts:
            view.aborted.append(self.request_ids[abort.handle])
        self.flights.append(Flight(plan.forward_id, view.rows))
        self.last_has_rows = bool(handles)
        return view

    def advance(self, results: list[tuple[str, list[int]]], finished: list[str], acks: list[tuple[str, int]]) -> int:
        """Hands over what is due: results by row in the order of the plans; returns nanoseconds in the scheduler."""
        events: list[Event] = [OperationDone(op_id) for _, op_id in acks]
        events += self._results(results)
        events += [Finish(self.handles[request_id]) for request_id in finished]
        started = self.now()
        self.scheduler.advance(events)
        return self.now() - started

    def gauges(self) -> dict[str, int]:
        """What is looked at between calls. A decoder whose last token is on its way wants no step any more."""
        snapshot = self.scheduler.snapshot()
        states = snapshot.states
        decoders = [row.handle for row in self.scheduler.requests(snapshot.live) if row.state == State.DECODING]
        complete = sum(self.scheduler.explain(handle).code == "generation_done" for handle in decoders)
        return {
            "waiting": sum(int(states[state]) for state in WAITING),
            "prefilling": int(states[State.PREFILLING]),
            "decoding": len(decoders) - complete,
            "retracted": sum(int(states[state]) for state in RETRACTED),
            "free_blocks": min(group.free for group in snapshot.groups),
        }

    def _results(self, results: list[tuple[str, list[int]]]) -> list[Event]:
        """One result a plan that is due; a row the benchmark says nothing about (an aborted request) brings none."""
        events: list[Event] = []
        position = 0
        while len(self.flights) > (self.overlap if self.last_has_rows else 0):
            flight = self.flights.popleft()
            tokens = np.full(len(flight.rows), -1, dtype=np.int32)
            for row, (request_id, _, _) in enumerate(flight.rows):
                if position < len(results) and results[position][0] == request_id:
                    tokens[row] = results[position][1][0] if results[position][1] else -1
                    position += 1
            if flight.forward_id:
                events.append(ForwardResult(flight.forward_id, tokens))
        assert position == len(results), "the benchmark brought a result of a row that is not out"
        return events


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that is out: its id (0: no rows) and its rows as the benchmark has them."""

    forward_id: int
    rows: list[tuple[str, str, int]]


def scheduler_config(a: Namespace, device_pages: int, max_model_len: int) -> SchedulerConfig:
    """The benchmark's options in our words; the page pool that it names for images is our host pool."""
    return SchedulerConfig(
        groups=cache_groups(a.groups, a.page),
        num_parents=device_pages,
        prefix_granularity=a.page,
        max_num_seqs=a.n,
        max_scheduled_tokens=a.budget,
        max_model_len=max_model_len,
        overlap_depth=a.overlap,
        mixed_batches=bool(a.mixed),
        host_parents=int(device_pages * a.snapshot) + int(device_pages * a.host),
        host_cache=a.host > 0,
    )


def cache_groups(groups: str, page: int) -> list[CacheGroup]:
    """``full``: one full-history group; ``hybrid``: a sliding window and a state group beside it."""
    full = CacheGroup(group_id="full", kind="full_history", block_granularity=page)
    if groups == "full":
        return [full]
    window = CacheGroup(
        group_id="window", kind="sliding_window", block_granularity=page, sliding_window_tokens=WINDOW_PAGES * page
    )
    return [full, window, CacheGroup(group_id="state", kind="state", checkpoint_granularity=page)]
