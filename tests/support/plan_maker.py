"""A tiny stand-in for the scheduler: plans for requests that are prefilled in chunks and then decode, with real deltas.

It exists so that the execution plane can be tested by itself, with batches that the scheduler would not happen to make.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import DeviceHandle, RowStart, StepResult
from tokenspeed.messages import SamplingParameters

Ints = NDArray[np.int32]


def ints(values: Sequence[int] = ()) -> Ints:
    return np.array(values, dtype=np.int32)


@dataclass
class Delta:
    """One group's block-table delta; see BlockTableDelta."""

    row: Ints = field(default_factory=ints)
    first_slot: Ints = field(default_factory=ints)
    count: Ints = field(default_factory=ints)
    version_from: Ints = field(default_factory=ints)
    version_to: Ints = field(default_factory=ints)
    ids: Ints = field(default_factory=ints)


@dataclass
class FakePlan:
    """The attributes of a Plan that the execution plane reads."""

    forward_id: int = 1
    row: Ints = field(default_factory=ints)
    kind: Ints = field(default_factory=ints)
    input_len: Ints = field(default_factory=ints)
    prefix_len: Ints = field(default_factory=ints)
    prompt_len: Ints = field(default_factory=ints)
    samples: Ints = field(default_factory=ints)
    input_ids: Ints = field(default_factory=ints)
    starts: Ints = field(default_factory=ints)
    tables: list[Delta] = field(default_factory=lambda: [Delta()])
    zero_blocks: list[Ints] = field(default_factory=lambda: [ints()])
    copy_blocks: list[NDArray[np.int32]] = field(default_factory=lambda: [np.zeros((0, 2), np.int32)])
    aborts: list[object] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return int(self.row.shape[0])

    @property
    def handle(self) -> Ints:
        return self.row


@dataclass
class Request:
    """One request in pool row ``row``; ``chunk`` tokens of the prompt are prefilled a step."""

    prompt: Sequence[int]
    row: int
    max_new_tokens: int = 8
    chunk: int = 1 << 30
    sampling: SamplingParameters = field(default_factory=lambda: SamplingParameters(top_k=1))
    output: list[int] = field(default_factory=list)
    computed: int = 0
    version: int = 0
    blocks: list[int] = field(default_factory=list)
    in_flight: int = 0

    @property
    def planned_output(self) -> int:
        return len(self.output) + self.in_flight

    @property
    def is_done(self) -> bool:
        return self.planned_output >= self.max_new_tokens


class PlanMaker:
    """Hands out blocks and makes plans; blocks are never reused, which a small test can afford."""

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._next_block = 1
        self._forward_id = 0

    def plan(self, requests: Sequence[Request], *, extra_slots: int = 0) -> tuple[FakePlan, list[RowStart]]:
        """One step of every request: the next chunk of its prompt, or one decode. Prefills are put first."""
        ordered = sorted(requests, key=self._decodes)
        plan, starts = FakePlan(), []
        self._forward_id += 1
        columns: list[tuple[int, int, int, int, int, int]] = []
        ids: list[int] = []
        delta: list[tuple[int, int, list[int], int]] = []
        for request in ordered:
            total = len(request.prompt)
            decoding = request.computed >= total
            length = 1 if decoding else min(request.chunk, total - request.computed)
            if request.computed == 0:
                starts.append(self._start(request))
            ids += [-1] if decoding else list(request.prompt[request.computed : request.computed + length])
            samples = int(request.computed + length >= total)
            columns.append((request.row, int(decoding), length, request.computed, total, samples))
            self._grow(request, request.computed + length + extra_slots, delta)
            request.computed += length
            request.in_flight += samples
        plan.forward_id = self._forward_id
        plan.row, plan.kind, plan.input_len, plan.prefix_len, plan.prompt_len, plan.samples = (
            ints(column) for column in zip(*columns, strict=True)
        )
        plan.input_ids = ints(ids)
        plan.tables = [_delta(delta)]
        return plan, starts

    def _decodes(self, request: Request) -> bool:
        return request.computed >= len(request.prompt)

    def _start(self, request: Request) -> RowStart:
        prompt = ints(request.prompt)
        return RowStart(handle=request.row, row=request.row, sampling=request.sampling, prompt=prompt, output=ints())

    def _grow(self, request: Request, tokens: int, delta: list[tuple[int, int, list[int], int]]) -> None:
        needed = -(-tokens // self._granularity) - len(request.blocks)
        if needed > 0:
            new = list(range(self._next_block, self._next_block + needed))
            self._next_block += needed
            delta.append((request.row, len(request.blocks), new, request.version))
            request.blocks += new
            request.version += 1


def _delta(entries: list[tuple[int, int, list[int], int]]) -> Delta:
    return Delta(
        row=ints([row for row, _, _, _ in entries]),
        first_slot=ints([first for _, first, _, _ in entries]),
        count=ints([len(ids) for _, _, ids, _ in entries]),
        version_from=ints([version for _, _, _, version in entries]),
        version_to=ints([version + 1 for _, _, _, version in entries]),
        ids=ints([block for _, _, ids, _ in entries for block in ids]),
    )


def collect(plan: FakePlan, result: StepResult, requests: Sequence[Request]) -> None:
    """Gives each request the token its row drew."""
    by_row = {request.row: request for request in requests}
    for place, row in enumerate(plan.row.tolist()):
        if plan.samples[place]:
            by_row[row].in_flight -= 1
            by_row[row].output.append(int(result.tokens[place]))


def run(
    handle: DeviceHandle,
    requests: Sequence[Request],
    *,
    granularity: int,
    overlap: int = 0,
    join: Callable[[int, Request], bool] = lambda step, request: True,
    watch: Callable[[FakePlan, StepResult], None] = lambda plan, result: None,
) -> list[list[int]]:
    """Runs all requests to their last token and returns their outputs.

    ``join(step, request)`` says whether a request that has not begun takes part in a step; ``overlap`` steps are queued
    before a result is read.
    """
    maker, step = PlanMaker(granularity), 0
    waiting: list[tuple[FakePlan, object]] = []
    while True:
        active = [request for request in requests if not request.is_done and (request.computed or join(step, request))]
        pending = any(not request.is_done for request in requests)
        if active:
            plan, starts = maker.plan(active)
            waiting.append((plan, handle.execute(plan, starts)))  # type: ignore[arg-type]
        elif not pending and not waiting:
            return [request.output for request in requests]
        while len(waiting) > (overlap if active else 0):
            done_plan, outcome = waiting.pop(0)
            result = outcome.result()  # type: ignore[attr-defined]
            watch(done_plan, result)
            collect(done_plan, result, requests)
        step += 1
