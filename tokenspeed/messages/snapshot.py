"""The engine's state as everybody outside sees it: the API's metrics, ``/v1/internal/state`` and the dashboard.

Everything is plain data of one moment. ``None`` means "does not exist here" (a state the role cannot enter, a tier that
is off) and is shown as a dash; it never stands for zero.
"""

from typing import Literal

import msgspec

STATES = (
    "Bootstrapping",
    "Submitted",
    "Prefetching",
    "Prefilling",
    "RemotePrefilling",
    "PrefillAwaitingResult",
    "PrefillDone",
    "Decoding",
    "Retracted",
    "Restoring",
    "Finishing",
    "Finished",
)
"""The twelve states of a request in the order of the transition table (a test pins it to the scheduler's own)."""

HELD = "Held"
"""The state of a request that the scheduler does not have yet, because its rules are being compiled."""


SNAPSHOT_VERSION = 2
"""Of the shape of StateSnapshot: raised where a field changes its meaning or goes, not where one is added."""


class GroupSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one cache group in one pool. ``held + cached + free + elsewhere == total``.

    Attributes:
        block_granularity: tokens of a block; 0 for a state, whose blocks cover no tokens of their own.
        pinned: among held and cached: a copy or a peer reads or writes them.
        elsewhere: blocks that the group cannot have now because other groups have the parents they would be cut from.
        map: one character for each of at most 256 equal runs of the group's blocks, in the order of their addresses:
            "p" pinned, "h" held, "c" cached, "." free, "-" elsewhere. A run shows what most of its blocks are; what
            exists anywhere is shown at least once where there are enough runs. "" without one.
    """

    group_id: str
    kind: str
    block_granularity: int
    bytes_per_block: int
    total: int
    held: int
    cached: int
    free: int
    pinned: int
    elsewhere: int = 0
    map: str = ""


class StorageSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The tier on disk: blocks and bytes that it has, the most bytes it may have, and operations that are out."""

    blocks: int
    bytes: int
    limit_bytes: int
    pending: int


class HeadroomSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What could be admitted now, by the scheduler's own rule: beside the reserves of all that run.

    Attributes:
        tokens: that the free and evictable blocks hold in the tightest group that keeps a history.
        largest: prompt and output tokens of the largest request that fits whole; 0 where none does.
        requests: how many more requests of ``typical_tokens`` fit, before those that wait have had theirs.
        typical_tokens: mean prompt and output so far of the live requests; 32768, or what one request may have at most,
            where none is alive.
    """

    tokens: int
    largest: int
    requests: int
    typical_tokens: int


EventKind = Literal[
    "retraction",
    "abort",
    "eviction_burst",
    "nan",
    "failed_step",
    "restart",
    "stuck",
    "storage_timeout",
    "slow_reader",
    "refused",
]


class EventSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. ``sequence`` grows and is never used twice while the server runs, restarts included.

    ``time`` is in seconds since the epoch; ``request_id`` is "" where it is nobody's; ``text`` is one sentence.
    """

    sequence: int
    time: float
    kind: EventKind
    request_id: str
    text: str


class QuantileSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of one measure, in its unit."""

    p50: float
    p90: float
    p99: float


class LatencySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What clients saw of the choices that ended in the last 60 s, in milliseconds; None where there is no sample.

    Attributes:
        requests: choices that ended.
        ttft_ms: from submission to the first token.
        inter_token_ms: between the tokens of a choice.
        end_to_end_ms: from submission to the end.
        queue_ms: from the engine's receipt to the first step.
    """

    requests: int
    ttft_ms: QuantileSnapshot | None
    inter_token_ms: QuantileSnapshot | None
    end_to_end_ms: QuantileSnapshot | None
    queue_ms: QuantileSnapshot | None


class AcceptanceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a step of speculative decoding accepts: the mean, and what the recipe was measured with."""

    mean: float
    golden: float


class PhaseSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine process stands: its phase, how far it is (``total`` 0: not known) and since when (epoch)."""

    name: str
    done: int
    total: int
    since: float


class FlowSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """How many requests ever went from one state to another."""

    source: str
    target: str
    count: int


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        state: one of STATES, or HELD.
        age_rounds, age_s: in the present state.
        blocks, host_blocks: held on the device, and in the host pool.
        reason: why it is not running; "" where it is.
        arrived: seconds since the epoch when the engine took it.
        output_limit: the most tokens it may generate.
        deadline: seconds since the epoch when the server ends it; None without one.
    """

    handle: int
    request_id: str
    state: str
    age_rounds: int
    priority: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    cached_tokens: int
    blocks: int
    retractions: int
    reason: str = ""
    age_s: float = 0.0
    arrived: float = 0.0
    host_blocks: int = 0
    output_limit: int = 0
    deadline: float | None = None


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A request came into ``state``, in the scheduler's round ``round``; ``time`` in seconds since the epoch."""

    state: str
    time: float
    round: int


class RequestDetail(RequestSnapshot, frozen=True, kw_only=True):
    """Everything that is known of one request, alive or among the last that ended.

    Attributes:
        time: seconds since the epoch when this was said.
        timeline: the states it came into, the oldest first; of a long life the newest, and ``timeline_omitted`` counts
            those before.
        explain: why it waits or what it holds, with figures, one sentence each, the most telling first.
        ended: seconds since the epoch when it ended; None while it lives.
        finish_reason: as the client was told it, "" while it lives; ``error`` says what went wrong.
    """

    time: float
    timeline: list[TimelineEntry] = []
    timeline_omitted: int = 0
    explain: list[str] = []
    ended: float | None = None
    finish_reason: str = ""
    error: str = ""


class StepSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time went, in milliseconds, as means over the recent steps."""

    plan_ms: float
    device_ms: float
    commit_ms: float
    bubble_ms: float


class CounterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the engine started.

    ``prefix_hit_tokens`` counts all tiers, ``host_hit_tokens`` and ``storage_hit_tokens`` what came from there.
    ``image_blocks`` were saved for retracted requests, ``restores`` brought them back; ``recomputed_tokens`` were lost
    to retractions without an image. ``failed_copies`` counts copies between device and host of which a block failed.
    ``late_kernel_work`` counts kernels bound, tuned or compiled while serving, which belongs before.
    """

    rounds: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    nan_rows: int = 0
    failed_steps: int = 0
    ignored_results: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    evictions: int = 0
    host_evictions: int = 0
    image_blocks: int = 0
    restores: int = 0
    recomputed_tokens: int = 0
    storage_timeouts: int = 0
    failed_copies: int = 0
    late_kernel_work: int = 0


class StateSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture.

    Attributes:
        time: seconds since the epoch when it was taken.
        uptime_s: seconds since the engine was ready.
        states: live count per state in the order of STATES (``Finished`` is cumulative); None where the role has no
            such state.
        host: the host pool by group; None without one.
        pending_operations: cache operations that are out.
        complete: whether the rows and the maps are here; nobody looked where they are not.
        requests: at most 200 rows by interest: those that wait (the longest waiting first), then those in prefill, then
            those that decode by the blocks they hold; ``requests_omitted`` counts the rest.
        held: of ``waiting``, requests whose rules (constraint, bad words, budget of reasoning) are being compiled.
        paused: whether an operator has stopped the planning of steps.
        last_progress: seconds since the epoch when a step last landed.
        has_work: whether any request is alive.
        storage: the tier on disk; None where it is off.
        headroom: None where the engine does not tell.
        events: the newest 64 at most, the oldest first; on the engine's wire only those not sent yet.
        latency, phase, restarts: by the API process; ``restarts`` counts engines that were lost and started again.
        acceptance: None, for this engine does not speculate yet.
    """

    time: float
    uptime_s: float
    role: str
    states: dict[str, int | None]
    groups: list[GroupSnapshot]
    flows: list[FlowSnapshot]
    counters: CounterSnapshot
    step: StepSnapshot
    running: int
    waiting: int
    last_progress: float
    has_work: bool
    requests: list[RequestSnapshot]
    requests_omitted: int = 0
    host: list[GroupSnapshot] | None = None
    pending_operations: int = 0
    version: int = SNAPSHOT_VERSION
    complete: bool = True
    held: int = 0
    paused: bool = False
    storage: StorageSnapshot | None = None
    headroom: HeadroomSnapshot | None = None
    events: list[EventSnapshot] = []
    latency: LatencySnapshot | None = None
    acceptance: AcceptanceSnapshot | None = None
    phase: PhaseSnapshot | None = None
    restarts: int = 0
