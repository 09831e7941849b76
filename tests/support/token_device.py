"""A device whose KV cache holds token ids, to test the control plane against.

It keeps block tables by the plan's deltas and "computes" a row by reading its whole sequence back through its full
group, the last window through its sliding groups and a running hash of all tokens through its states; the next token is
a hash of what it read. So a wrong block, a table out of step, a block that was given away too early, a stale cached
prefix, a wrong checkpoint or a copy that went astray changes tokens, as it would on a real device; ``expected_tokens``
says what they should be.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from token_cache import STATE_WORDS, TokenCache, absorb, group

from tokenspeed.device.handle import OperationOutcome, RowStart, StepFailed, StepResult, StepTimings, StorageUsage
from tokenspeed.device.storage.backend import StorageBackend
from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed_scheduler import Plan

VOCABULARY = 1000
ONE_GROUP = (group(),)


def next_token(sequence: Sequence[int], groups: Sequence[GroupFacts] = ONE_GROUP) -> int:
    """The token this device's model puts after ``sequence``."""
    parts = []
    for facts in groups:
        if facts.kind == "state":
            parts.append(absorb(bytes(4 * STATE_WORDS), sequence))
        else:
            parts.append(_bytes(sequence[-facts.sliding_window_tokens :]))
    return _token(parts)


def expected_tokens(prompt: Sequence[int], count: int, groups: Sequence[GroupFacts] = ONE_GROUP) -> list[int]:
    """The ``count`` tokens that follow ``prompt`` whatever else runs."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence, groups))
    return sequence[len(prompt) :]


def _mark(which: int) -> int:
    """The same tokens are other words in another group, as other layers would leave other values."""
    return which << 24


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def _token(parts: list[bytes]) -> int:
    digest = hashlib.blake2b(b"".join(parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


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
    """A DeviceHandle, of one full-history group unless ``groups`` says otherwise.

    ``fail`` and ``nan`` say which steps and rows go wrong, ``cache.fail_copy`` which copies. ``storage_answers`` False
    holds storage operations back.
    """

    def __init__(
        self,
        *,
        granularity: int,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[GroupFacts] = (),
        host_parents: int = 0,
        storage: StorageBackend | None = None,
    ) -> None:
        self.groups = tuple(groups) or (group(granularity=granularity),)
        finest = min(
            (facts.block_granularity for facts in self.groups if facts.block_granularity), default=max_model_len
        )
        self.cache = TokenCache(
            groups=self.groups,
            num_parents=num_blocks,
            num_rows=max_num_seqs + 1,
            num_slots=-(-max_model_len // finest) + 2,
            host_parents=host_parents,
            storage=storage,
        )
        self.last = np.full(max_num_seqs + 1, -1, dtype=np.int32)
        self.fail: Callable[[int], bool] = lambda forward_id: False
        self.nan: Callable[[int, int], bool] = lambda forward_id, handle: False
        self.storage_answers = True
        self.steps = 0
        self.input_tokens = 0
        self.max_rows = 0
        self.starts: list[RowStart] = []
        self._sequence: dict[int, list[int]] = {}
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

    def finished_operations(self) -> list[OperationOutcome]:
        return self.cache.finish_storage() if self.storage_answers else []

    def storage_usage(self) -> StorageUsage | None:
        return self.cache.storage.usage() if self.cache.storage is not None else None

    def shutdown(self) -> None:
        self._queue.clear()

    def _compute(self, plan: Plan, starts: Sequence[RowStart]) -> StepResult:
        operations = self.cache.prepare(plan, [start.row for start in starts])
        for start in starts:
            self.last[start.row] = start.output[-1] if start.output.size else -1
            self._sequence[start.row] = [*start.prompt.tolist(), *start.output.tolist()]
        self.steps += plan.num_rows > 0
        self.max_rows = max(self.max_rows, plan.num_rows)
        self.input_tokens += int(plan.input_len.sum())
        if self.fail(plan.forward_id):
            raise ValueError("planted")
        rows = self._rows(plan)
        for prefix, row, ids in rows:
            self._write(row, prefix, ids)
        states = [self._states(row, prefix, ids) for prefix, row, ids in rows]
        tokens = np.full(plan.num_rows, -1, dtype=np.int32)
        nan = np.array([self.nan(plan.forward_id, handle) for handle in plan.handle.tolist()], np.bool_)
        for index in np.flatnonzero(np.logical_and(plan.samples, ~nan)).tolist():
            prefix, row, ids = rows[index]
            tokens[index] = self.last[row] = _token(self._read(row, prefix, prefix + len(ids), states[index]))
            self._sequence[row].append(int(tokens[index]))
        timings = StepTimings(queued=0.0, prepare=0.0, forward=0.0, sample=0.0)
        return StepResult(forward_id=plan.forward_id, tokens=tokens, nan=nan, operations=operations, timings=timings)

    def _rows(self, plan: Plan) -> list[tuple[int, int, list[int]]]:
        """(prefix, pool row, input tokens) of each row of the plan."""
        rows, ends = plan.row.tolist(), np.cumsum(plan.input_len)
        parts = np.split(plan.input_ids, ends[:-1]) if rows else []
        return [
            (prefix, row, [int(self.last[row]) if token < 0 else token for token in ids.tolist()])
            for prefix, row, ids in zip(plan.prefix_len.tolist(), rows, parts, strict=True)
        ]

    def _write(self, row: int, prefix: int, tokens: list[int]) -> None:
        """Everything is written before anything is read, so that a block with two owners shows at once."""
        for which, facts in enumerate(self.groups):
            if facts.kind != "state":
                granularity, table = facts.block_granularity, self.cache.tables[which].ids[row]
                for position, token in enumerate(tokens, prefix):
                    block = self.cache.device.block(which, int(table[position // granularity]))
                    block[position % granularity] = token ^ _mark(which)

    def _states(self, row: int, prefix: int, tokens: list[int]) -> dict[int, bytes]:
        """The states after ``tokens``, by group."""
        return {
            which: self._state(which, self.cache.tables[which].ids[row].tolist(), prefix, tokens)
            for which, facts in enumerate(self.groups)
            if facts.kind == "state"
        }

    def _read(self, row: int, prefix: int, end: int, states: dict[int, bytes]) -> list[bytes]:
        """What the last of the tokens ``prefix`` .. ``end`` - 1 reads of each group."""
        parts = []
        for which, facts in enumerate(self.groups):
            if facts.kind == "state":
                parts.append(states[which])
                continue
            granularity, window = facts.block_granularity, facts.sliding_window_tokens or end
            # The first of these tokens sees the window before it; slots before that may be null by now.
            first = max(0, prefix - window + 1)
            blocks = self.cache.tables[which].ids[row, first // granularity : -(-end // granularity)]
            words = self.cache.device.gather(which, blocks)[first % granularity :][: end - first]
            seen = (words ^ _mark(which)).tolist()
            # What only the earlier of these tokens see would spoil their own cache entries.
            spoilt = b"" if seen == self._sequence[row][first:end] else b"spoilt"
            parts.append(_bytes(seen[-window:]) + spoilt)
        return parts

    def _state(self, which: int, table: list[int], prefix: int, tokens: list[int]) -> bytes:
        """The table is [input, live]: a state starts from the input where there is one, and ends in the live block."""
        start, live = table[:2]
        state = bytes(4 * STATE_WORDS)
        if prefix:
            state = self.cache.device.block(which, start or live).tobytes()
        state = absorb(state, tokens)
        self.cache.device.block(which, live)[:] = np.frombuffer(state, np.int32)
        return state
