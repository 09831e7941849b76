"""A device whose KV cache holds token ids, to test the control plane against.

It keeps block tables by the plan's deltas and "computes" a row by reading its whole sequence back through its table;
the next token is a hash of what it read. So a wrong block, a table out of step, a block that was given away too early
or a stale cached prefix changes tokens, as it would on a real device; ``expected_tokens`` says what they should be.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import RowStart, StepFailed, StepResult, StepTimings
from tokenspeed_scheduler import Plan

VOCABULARY = 1000


def next_token(sequence: Sequence[int]) -> int:
    """The token this device's model puts after ``sequence``."""
    digest = hashlib.blake2b(np.asarray(sequence, dtype=np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The ``count`` tokens that follow ``prompt`` whatever else runs."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class TokenStep:
    """A step that is computed when its result is asked for, so that one more can be queued behind it."""

    def __init__(self, forward_id: int, compute: Callable[[], StepResult]) -> None:
        self.forward_id = forward_id
        self._compute = compute
        self._outcome: StepResult | StepFailed | None = None

    def done(self) -> bool:
        return self._outcome is not None

    def run(self) -> None:
        if self._outcome is None:
            try:
                self._outcome = self._compute()
            except Exception as error:
                failure = StepFailed(f"step {self.forward_id} failed")
                failure.__cause__ = error
                self._outcome = failure

    def result(self) -> StepResult:
        self.run()
        assert self._outcome is not None
        if isinstance(self._outcome, StepFailed):
            raise self._outcome
        return self._outcome


class TokenDevice:
    """A DeviceHandle of one full-history group. ``fail`` and ``nan`` say which steps and rows go wrong."""

    def __init__(self, *, granularity: int, num_blocks: int, max_num_seqs: int, max_model_len: int) -> None:
        self.granularity = granularity
        self.store = np.full((num_blocks + 1, granularity), -1, dtype=np.int32)
        slots = -(-max_model_len // granularity) + 2
        self.tables = np.zeros((max_num_seqs + 1, slots), dtype=np.int32)
        self.versions = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self.last = np.full(max_num_seqs + 1, -1, dtype=np.int32)
        self.fail: Callable[[int], bool] = lambda forward_id: False
        self.nan: Callable[[int, int], bool] = lambda forward_id, handle: False
        self.steps = 0
        self.input_tokens = 0
        self.max_rows = 0
        self.starts: list[RowStart] = []
        self._queue: list[TokenStep] = []

    def execute(self, plan: Plan, starts: Sequence[RowStart]) -> TokenStep:
        self.starts.extend(starts)
        queued = list(self._queue)

        def compute() -> StepResult:
            for step in queued:
                step.run()
            return self._compute(plan, starts)

        step = TokenStep(plan.forward_id, compute)
        self._queue = [earlier for earlier in self._queue if not earlier.done()] + [step]
        return step

    def shutdown(self) -> None:
        self._queue.clear()

    def _compute(self, plan: Plan, starts: Sequence[RowStart]) -> StepResult:
        for start in starts:
            self.versions[start.row] = 0
            self.tables[start.row] = 0
        self._apply_deltas(plan)
        self.steps += 1
        self.max_rows = max(self.max_rows, plan.num_rows)
        self.input_tokens += int(plan.input_len.sum())
        if self.fail(plan.forward_id):
            raise ValueError("planted")
        tokens = np.full(plan.num_rows, -1, dtype=np.int32)
        nan = np.zeros(plan.num_rows, dtype=np.bool_)
        offset = 0
        for index in range(plan.num_rows):
            length = int(plan.input_len[index])
            ids = plan.input_ids[offset : offset + length]
            offset += length
            tokens[index], nan[index] = self._row(plan, index, ids)
        timings = StepTimings(queued=0.0, prepare=0.0, forward=0.0, sample=0.0)
        return StepResult(forward_id=plan.forward_id, tokens=tokens, nan=nan, timings=timings)

    def _apply_deltas(self, plan: Plan) -> None:
        (delta,) = plan.tables
        offset = 0
        for index in range(len(delta.row)):
            row, first, count = int(delta.row[index]), int(delta.first_slot[index]), int(delta.count[index])
            assert self.versions[row] == delta.version_from[index], "a block table is out of step"
            self.versions[row] = delta.version_to[index]
            self.tables[row, first : first + count] = delta.ids[offset : offset + count]
            self.tables[row, first + count :] = 0
            offset += count

    def _row(self, plan: Plan, index: int, ids: NDArray[np.int32]) -> tuple[int, bool]:
        row, prefix = int(plan.row[index]), int(plan.prefix_len[index])
        if self.nan(plan.forward_id, int(plan.handle[index])):
            return -1, True
        for position, token in enumerate(ids.tolist(), prefix):
            block = int(self.tables[row, position // self.granularity])
            assert block > 0, "a token would be written to the null block"
            self.store[block, position % self.granularity] = self.last[row] if token < 0 else token
        if not plan.samples[index]:
            return -1, False
        length = prefix + len(ids)
        blocks = self.tables[row, : -(-length // self.granularity)]
        sequence = self.store[blocks].reshape(-1)[:length]
        assert (sequence >= 0).all(), "a token was read that was never written"
        self.last[row] = next_token(sequence.tolist())
        return int(self.last[row]), False
