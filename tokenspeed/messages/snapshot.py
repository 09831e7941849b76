"""The engine's state as everybody outside sees it: the API's metrics, ``/v1/internal/state`` and the dashboard.

Everything is plain data of one moment. ``None`` means "does not exist here" (a state the role cannot enter, a tier that
is off) and is shown as a dash; it never stands for zero.
"""

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


class GroupSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one cache group in one pool. ``held + cached + free == total``; ``pinned`` is among held and cached.

    ``block_granularity`` is 0 for a state, whose blocks cover no tokens of their own.
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


class FlowSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """How many requests ever went from one state to another."""

    source: str
    target: str
    count: int


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One live request. ``age_rounds`` counts rounds in the present state; ``reason`` says why it is not running."""

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
        requests: at most 200 rows, the oldest first; ``requests_omitted`` counts the rest.
        last_progress: seconds since the epoch when a step last landed.
        has_work: whether any request is alive.
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
