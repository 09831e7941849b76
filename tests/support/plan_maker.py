"""A tiny stand-in for the scheduler: plans for requests that are prefilled in chunks and then decode, with real deltas.

It exists so that the execution plane can be tested by itself, with batches that the scheduler would not happen to make.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import DeviceHandle, RowStart, StepResult
from tokenspeed.device.specs import DeviceSpecs
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
class FakeOperation:
    """The attributes of a CacheOperation; see there."""

    op_id: int
    kind: int
    group: Ints = field(default_factory=ints)
    source: Ints = field(default_factory=ints)
    target: Ints = field(default_factory=ints)
    digests: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))
    offsets: Ints = field(default_factory=ints)
    handle: int = 0


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
    operations: list["FakeOperation"] = field(default_factory=list)
    aborts: list[object] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return int(self.row.shape[0])

    @property
    def handle(self) -> Ints:
        return self.row


@dataclass(frozen=True)
class Group:
    """A cache group: the tokens that stay visible (0: all), how many of its blocks make a parent, and whether it is one
    of states: its table is the input, which a request may begin with, and the live block."""

    window: int = 0
    children: int = 1
    is_state: bool = False


def groups_of(specs: DeviceSpecs) -> list[Group]:
    return [
        Group(facts.sliding_window_tokens, facts.children_per_parent, facts.kind == "state") for facts in specs.groups
    ]


@dataclass
class Request:
    """One request in pool row ``row``; ``chunk`` tokens of the prompt are prefilled a step.

    ``cached`` tokens are computed already; ``blocks`` then lists, for each group, the ones that hold them (0: none).
    """

    prompt: Sequence[int]
    row: int
    max_new_tokens: int = 8
    chunk: int = 1 << 30
    sampling: SamplingParameters = field(default_factory=lambda: SamplingParameters(top_k=1))
    output: list[int] = field(default_factory=list)
    cached: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    computed: int = 0
    versions: list[int] = field(default_factory=list)
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.computed = self.computed or self.cached

    @property
    def planned_output(self) -> int:
        return len(self.output) + self.in_flight

    @property
    def is_done(self) -> bool:
        return self.planned_output >= self.max_new_tokens


class PlanMaker:
    """Hands out blocks and makes plans.

    Blocks that a window left are null from the next step on and handed out again at once, in that same step; others are
    never reused, which a small test can afford.
    """

    def __init__(self, granularity: int, groups: Sequence[Group] = (Group(),)) -> None:
        self._granularity = granularity
        self._groups = groups
        self._free: list[deque[int]] = [deque() for _ in groups]
        self._holders: Counter[tuple[int, int]] = Counter()
        self._next_parent = 1
        self._forward_id = 0

    def plan(self, requests: Sequence[Request], *, extra_slots: int = 0) -> tuple[FakePlan, list[RowStart]]:
        """One step of every request: the next chunk of its prompt, or one decode. Prefills are put first."""
        ordered = sorted(requests, key=self._decodes)
        plan, starts = FakePlan(), []
        self._forward_id += 1
        columns: list[tuple[int, int, int, int, int, int]] = []
        ids: list[int] = []
        deltas: list[list[tuple[int, int, list[int], int]]] = [[] for _ in self._groups]
        for request in ordered:
            total = len(request.prompt)
            decoding = request.computed >= total
            length = 1 if decoding else min(request.chunk, total - request.computed)
            if request.computed == request.cached:
                starts.append(self._start(request))
            ids += [-1] if decoding else list(request.prompt[request.computed : request.computed + length])
            samples = int(request.computed + length >= total)
            columns.append((request.row, int(decoding), length, request.computed, total, samples))
            for group, delta in enumerate(deltas):
                self._update(request, group, request.computed + length + extra_slots, delta)
            request.computed += length
            request.in_flight += samples
        plan.forward_id = self._forward_id
        plan.row, plan.kind, plan.input_len, plan.prefix_len, plan.prompt_len, plan.samples = (
            ints(column) for column in zip(*columns, strict=True)
        )
        plan.input_ids = ints(ids)
        plan.tables = [_delta(delta) for delta in deltas]
        plan.zero_blocks = [ints() for _ in deltas]
        plan.copy_blocks = [np.zeros((0, 2), np.int32) for _ in deltas]
        return plan, starts

    def _decodes(self, request: Request) -> bool:
        return request.computed >= len(request.prompt)

    def _start(self, request: Request) -> RowStart:
        prompt = ints(request.prompt)
        return RowStart(handle=request.row, row=request.row, sampling=request.sampling, prompt=prompt, output=ints())

    def _update(self, request: Request, group: int, tokens: int, delta: list[tuple[int, int, list[int], int]]) -> None:
        """Drops the blocks before the window of the step's first query, then adds those that ``tokens`` tokens need."""
        if len(request.versions) == group:
            request.versions.append(0)
            if group == len(request.blocks):
                request.blocks.append([])
            blocks, before = request.blocks[group], []
            self._holders.update((group, block) for block in blocks)
        else:
            blocks = request.blocks[group]
            before = list(blocks)
        window = self._groups[group].window
        hidden = max(0, request.computed - window + 1) // self._granularity if window else 0
        for slot, block in enumerate(blocks[:hidden]):
            if block:
                self._drop(group, block)
                blocks[slot] = 0
        if self._groups[group].is_state:
            if not before:
                blocks[:] = [*(blocks or [0]), self._take(group)]
            elif blocks[0]:
                blocks[0] = 0  # the step before went on from it
        while not self._groups[group].is_state and len(blocks) * self._granularity < tokens:
            blocks.append(self._take(group))
        first = next((slot for slot, pair in enumerate(zip(before, blocks, strict=False)) if pair[0] != pair[1]), None)
        first = len(before) if first is None else first
        if blocks[first:]:
            delta.append((request.row, first, blocks[first:], request.versions[group]))
            request.versions[group] += 1

    def _take(self, group: int) -> int:
        free, children = self._free[group], self._groups[group].children
        if not free:
            free.extend(range(self._next_parent * children, (self._next_parent + 1) * children))
            self._next_parent += 1
        block = free.popleft()
        self._holders[group, block] = 1
        return block

    def _drop(self, group: int, block: int) -> None:
        self._holders[group, block] -= 1
        if not self._holders[group, block]:
            self._free[group].appendleft(block)


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
    groups: Sequence[Group] = (Group(),),
    overlap: int = 0,
    join: Callable[[int, Request], bool] = lambda step, request: True,
    watch: Callable[[FakePlan, StepResult], None] = lambda plan, result: None,
) -> list[list[int]]:
    """Runs all requests to their last token and returns their outputs.

    ``join(step, request)`` says whether a request that has not begun takes part in a step; ``overlap`` steps are queued
    before a result is read.
    """
    maker, step = PlanMaker(granularity, groups), 0
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
