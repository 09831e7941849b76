"""A device that computes nothing: its steps take as long as the script says, on a clock that only they move."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenspeed.device.handle import OperationOutcome, RowStart, StepResult, StepTimings, StorageUsage
from tokenspeed.launch.demo.clock import DemoClock
from tokenspeed.launch.demo.storage import SECONDS, DemoStorage
from tokenspeed_scheduler import Plan, RowKind

STEP_S, PREFILL_TOKEN_S, DECODE_ROW_S = 9e-3, 35e-6, 0.3e-3
SHARES = (0.06, 0.88, 0.06)
"""Of a step: preparing, forward, sampling."""

END_TOKEN = 0


@dataclass
class DemoStep:
    """A step on its way: whoever asks for its result waits until it is due."""

    forward_id: int
    due: float
    outcome: StepResult
    clock: DemoClock

    def done(self) -> bool:
        return self.clock.now >= self.due

    def result(self) -> StepResult:
        self.clock.move_to(self.due)
        return self.outcome


class DemoDevice:
    """A DeviceHandle. ``ends`` says, by handle, at which length of prompt and output a request's end token comes."""

    def __init__(self, clock: DemoClock, ends: dict[int, int], storage: DemoStorage) -> None:
        self._clock = clock
        self._ends = ends
        self._storage = storage
        self._free_at = 0.0

    def execute(self, plan: Plan, starts: Sequence[RowStart]) -> DemoStep:
        del starts  # what a token is depends on its request and position alone
        copies = []
        for operation in plan.operations:
            if operation.kind in SECONDS:
                self._storage.take(operation)
            else:
                copies.append(OperationOutcome(op_id=operation.op_id))
        seconds = _seconds(plan)
        begin = max(self._clock.now, self._free_at)
        self._free_at = begin + seconds
        prepare, forward, sample = (share * seconds for share in SHARES)
        timings = StepTimings(queued=begin - self._clock.now, prepare=prepare, forward=forward, sample=sample)
        outcome = StepResult(
            forward_id=plan.forward_id,
            tokens=self._tokens(plan),
            nan=np.zeros(plan.num_rows, np.bool_),
            operations=tuple(copies),
            timings=timings,
        )
        return DemoStep(plan.forward_id, self._free_at, outcome, self._clock)

    def finished_operations(self) -> list[OperationOutcome]:
        return self._storage.finished()

    def storage_usage(self) -> StorageUsage:
        return self._storage.usage()

    def shutdown(self) -> None:
        """Nothing runs."""

    def _tokens(self, plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        tokens = np.full(plan.num_rows, -1, np.int32)
        lengths = plan.prefix_len + plan.input_len + 1
        for index in np.flatnonzero(plan.samples).tolist():
            handle, length = int(plan.handle[index]), int(lengths[index])
            tokens[index] = END_TOKEN if length >= self._ends[handle] else demo_token(handle, length)
        return tokens


def demo_token(handle: int, length: int) -> int:
    """The token that makes a request's sequence ``length`` long: any but the end token."""
    return 1 + (handle * 7919 + length * 104729) % 50_000


def _seconds(plan: Plan) -> float:
    if not plan.num_rows:
        return 1e-3
    prefill = plan.kind == RowKind.PREFILL
    tokens, decodes = int(plan.input_len[prefill].sum()), int(plan.num_rows - prefill.sum())
    return STEP_S + PREFILL_TOKEN_S * tokens + DECODE_ROW_S * decodes
