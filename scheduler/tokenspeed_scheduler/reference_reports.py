"""What the plain twin remembers of a request, its plans and reports: plain data with the native attributes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenspeed_scheduler import RowKind, State
from tokenspeed_scheduler.reference_pool import ReferenceCounts, Table

Ints = NDArray[np.int32]


def ints(values: Sequence[int]) -> Ints:
    """A read-only int32 array."""
    array = np.array(values, dtype=np.int32)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Visit:
    """See Visit of the native scheduler."""

    state: State
    round: int
    time: float


@dataclass(eq=False)
class Request:
    """One live request.

    Attributes:
        tokens: the prompt and every token whose result landed.
        goal: tokens that are prefilled since its row began: the prompt, and what was generated before a retraction.
        computed: tokens whose cache is scheduled. ``scheduled``: samples that are.
        out: its results that have not landed. ``row``: 0 for none, and then it holds no block.
        ended: Finish or Abort came. ``lost``: a row failed, or one that samples brought no token.
    """

    handle: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    priority: int
    place: int
    state: State = State.SUBMITTED
    since: int = 0
    goal: int = 0
    computed: int = 0
    scheduled: int = 0
    out: int = 0
    row: int = 0
    tables: list[Table] = field(default_factory=list)
    retractions: int = 0
    ended: bool = False
    lost: bool = False
    arrived: float = 0.0
    visits: list[Visit] = field(default_factory=list)
    visits_omitted: int = 0

    @property
    def line_key(self) -> tuple[int, int]:
        """Its place in the line: the smallest is first."""
        return (-self.priority, self.place)

    @property
    def is_prefilled(self) -> bool:
        return self.row > 0 and self.computed >= self.goal


@dataclass(frozen=True)
class Row:
    """One row of a plan; ``ids`` are its input tokens, -1 for the one it sampled last."""

    handle: int
    row: int
    kind: RowKind
    prefix_len: int
    prompt_len: int
    samples: bool
    ids: list[int]


@dataclass(frozen=True)
class ReferenceDelta:
    """See BlockTableDelta."""

    row: Ints
    first_slot: Ints
    count: Ints
    version_from: Ints
    version_to: Ints
    ids: Ints


@dataclass(frozen=True)
class ReferenceAbort:
    """See PlanAbort."""

    handle: int
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class ReferencePlan:
    """See Plan. Nothing is zeroed or copied, and there are no cache operations."""

    forward_id: int
    num_rows: int
    handle: Ints
    row: Ints
    kind: Ints
    input_len: Ints
    prefix_len: Ints
    prompt_len: Ints
    samples: Ints
    input_ids: Ints
    starts: Ints
    tables: list[ReferenceDelta]
    zero_blocks: list[Ints]
    copy_blocks: list[Ints]
    aborts: list[ReferenceAbort]
    operations: list[object] = field(default_factory=list)

    def digest(self) -> bytes:
        """SHA-256 over everything the plan says; it is comparable with those of other twins only."""
        rows = (self.handle, self.row, self.kind, self.input_len, self.prefix_len, self.prompt_len, self.samples)
        parts = [*rows, self.input_ids, self.starts]
        for delta in self.tables:
            parts += [delta.row, delta.first_slot, delta.count, delta.version_from, delta.version_to, delta.ids]
        says = hashlib.sha256(str((self.forward_id, self.aborts)).encode())
        for part in parts:
            says.update(len(part).to_bytes(8, "little") + part.astype("<i4").tobytes())
        return says.digest()


def make_plan(
    forward_id: int,
    rows: Sequence[Row],
    tables: Sequence[tuple[int, list[Table]]],
    num_groups: int,
    aborts: Sequence[tuple[int, str, str]],
) -> ReferencePlan:
    """Puts the rows and what changed in their ``tables`` (pool row, a table a group) into a plan."""
    return ReferencePlan(
        forward_id=forward_id,
        num_rows=len(rows),
        handle=ints([row.handle for row in rows]),
        row=ints([row.row for row in rows]),
        kind=ints([row.kind for row in rows]),
        input_len=ints([len(row.ids) for row in rows]),
        prefix_len=ints([row.prefix_len for row in rows]),
        prompt_len=ints([row.prompt_len for row in rows]),
        samples=ints([row.samples for row in rows]),
        input_ids=ints([token for row in rows for token in row.ids]),
        starts=ints([place for place, row in enumerate(rows) if row.prefix_len == 0]),
        tables=[_delta([(row, own[group]) for row, own in tables]) for group in range(num_groups)],
        zero_blocks=[ints([]) for _ in range(num_groups)],
        copy_blocks=[ints([]).reshape(0, 2) for _ in range(num_groups)],
        aborts=[ReferenceAbort(*abort) for abort in aborts],
    )


def _delta(tables: Sequence[tuple[int, Table]]) -> ReferenceDelta:
    entries: list[tuple[int, int, int, int, int]] = []
    ids: list[int] = []
    for row, table in tables:
        if table.changed_from is not None:
            tail = table.slots[table.changed_from :]
            entries.append((row, table.changed_from, len(tail), table.version, table.version + 1))
            ids += tail
            table.version += 1
            table.changed_from = None
    columns = np.array(entries, dtype=np.int32).reshape(-1, 5).T
    pool_row, first_slot, count, version_from, version_to = (ints(column.tolist()) for column in columns)
    return ReferenceDelta(pool_row, first_slot, count, version_from, version_to, ints(ids))


@dataclass(frozen=True, eq=False)
class ReferenceSnapshot:
    """See Snapshot; what the twin does not have stays 0."""

    round: int
    states: NDArray[np.int64]
    groups: list[ReferenceCounts]
    flows: list[tuple[int, int, int]]
    running: int
    waiting: int
    live: int
    retractions: int
    ignored_results: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    overtakes: int = 0
    evictions: int = 0
    host: list[ReferenceCounts] = field(default_factory=list)
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    host_evictions: int = 0
    pending_operations: int = 0
    image_blocks: int = 0
    restores: int = 0
    storage_timeouts: int = 0


@dataclass(frozen=True)
class ReferenceRow:
    """See RequestRow."""

    handle: int
    state: State
    age_rounds: int
    priority: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    cached_tokens: int
    blocks: int
    retractions: int
    reason: str
    max_new_tokens: int
    host_blocks: int
    arrived: float
    since: float

    @staticmethod
    def of(request: Request, now: int, reason: str) -> "ReferenceRow":
        """The row of a request in round ``now``."""
        return ReferenceRow(
            handle=request.handle,
            state=request.state,
            age_rounds=now - request.since,
            priority=request.priority,
            prompt_tokens=request.prompt_len,
            computed_tokens=request.computed,
            generated_tokens=len(request.tokens) - request.prompt_len,
            cached_tokens=0,
            blocks=sum(len(table.held()) for table in request.tables),
            retractions=request.retractions,
            reason=reason,
            max_new_tokens=request.max_new_tokens,
            host_blocks=0,
            arrived=request.arrived,
            since=request.visits[-1].time,
        )


@dataclass(frozen=True)
class ReferenceExplanation:
    """See Explanation."""

    handle: int
    state: State
    code: str
    text: str
    short_by: int = 0
    group_id: str = ""
    other: int = 0
    op_id: int = 0
