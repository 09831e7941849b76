"""A server's state, read without trusting it: whatever is missing or of another type is None and shown as a dash.

The structs mirror those of ``tokenspeed.telemetry.snapshot`` field by field (a test pins that), with None allowed
everywhere: a dashboard must not go blank because the server it looks at is a version older or newer.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tokenspeed.telemetry.snapshot import STATES

MOST_LETTERS = 2_000
"""Of one text: more than any screen shows of it."""

_View = TypeVar("_View", bound=msgspec.Struct)


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one cache group, see GroupSnapshot."""

    group_id: str | None = None
    kind: str | None = None
    block_granularity: int | None = None
    bytes_per_block: int | None = None
    total: int | None = None
    held: int | None = None
    cached: int | None = None
    free: int | None = None
    pinned: int | None = None
    elsewhere: int | None = None
    map: str = ""


class StorageView(msgspec.Struct, frozen=True, kw_only=True):
    """The tier on disk, see StorageSnapshot."""

    blocks: int | None = None
    bytes: int | None = None
    limit_bytes: int | None = None
    pending: int | None = None


class HeadroomView(msgspec.Struct, frozen=True, kw_only=True):
    """What could be admitted now, by the scheduler's own rule, see HeadroomSnapshot."""

    tokens: int | None = None
    largest: int | None = None
    requests: int | None = None
    typical_tokens: int | None = None


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, see EventSnapshot; ``kind`` may be one that this dashboard does not know."""

    sequence: int | None = None
    time: float | None = None
    kind: str | None = None
    request_id: str | None = None
    text: str | None = None


class QuantileView(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of one measure, see QuantileSnapshot."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class LatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """What clients saw in the last 60 s, in milliseconds, see LatencySnapshot."""

    requests: int | None = None
    ttft_ms: QuantileView | None = None
    inter_token_ms: QuantileView | None = None
    end_to_end_ms: QuantileView | None = None
    queue_ms: QuantileView | None = None


class AcceptanceView(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a step of speculative decoding accepts, see AcceptanceSnapshot."""

    mean: float | None = None
    golden: float | None = None


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the start of the engine is, see PhaseSnapshot."""

    name: str | None = None
    done: int | None = None
    total: int | None = None
    since: float | None = None


class FlowView(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests ever went from one state to another, see FlowSnapshot."""

    source: str | None = None
    target: str | None = None
    count: int | None = None


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One live request, see RequestSnapshot."""

    handle: int | None = None
    request_id: str | None = None
    state: str | None = None
    age_rounds: int | None = None
    priority: int | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    blocks: int | None = None
    retractions: int | None = None
    reason: str | None = None
    age_s: float | None = None
    arrived: float | None = None
    host_blocks: int | None = None
    output_limit: int | None = None
    deadline: float | None = None


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time went, in milliseconds, see StepSnapshot."""

    plan_ms: float | None = None
    device_ms: float | None = None
    commit_ms: float | None = None
    bubble_ms: float | None = None


class CounterView(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the engine started, see CounterSnapshot."""

    rounds: int | None = None
    steps: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    finished: int | None = None
    aborted: int | None = None
    retractions: int | None = None
    nan_rows: int | None = None
    failed_steps: int | None = None
    ignored_results: int | None = None
    host_hit_tokens: int | None = None
    storage_hit_tokens: int | None = None
    evictions: int | None = None
    host_evictions: int | None = None
    image_blocks: int | None = None
    restores: int | None = None
    recomputed_tokens: int | None = None
    storage_timeouts: int | None = None
    failed_copies: int | None = None
    late_kernel_work: int | None = None


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state at one moment, see StateSnapshot. ``states`` has all twelve names."""

    time: float | None = None
    uptime_s: float | None = None
    role: str | None = None
    states: dict[str, int | None] = {}
    groups: tuple[GroupView, ...] = ()
    flows: tuple[FlowView, ...] = ()
    counters: CounterView = CounterView()
    step: StepView = StepView()
    running: int | None = None
    waiting: int | None = None
    last_progress: float | None = None
    has_work: bool | None = None
    requests: tuple[RequestView, ...] = ()
    requests_omitted: int | None = None
    host: tuple[GroupView, ...] | None = None
    pending_operations: int | None = None
    version: int | None = None
    complete: bool | None = None
    held: int | None = None
    paused: bool | None = None
    storage: StorageView | None = None
    headroom: HeadroomView | None = None
    events: tuple[EventView, ...] = ()
    latency: LatencyView | None = None
    acceptance: AcceptanceView | None = None
    phase: PhaseView | None = None
    restarts: int | None = None


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /v1/internal/state``.

    Attributes:
        snapshot: the engine's last one; None before the first.
        model: the served name. recipe, profile, recipe_hash: where its configuration came from.
        phase, detail, error: where the engine process stands, and what went wrong.
        progress: how far it is in that phase.
        vendor, device, devices: whose device it runs on, what PyTorch calls that, and on how many.
        lost: how many engine processes were lost so far.
        max_model_len: the most tokens of one request, from the engine's facts.
        kernels: operation to the kernel that was chosen for it, from the engine's facts.
        age_s: how old the snapshot was when the server answered, by the server's clock.
        server_time: that clock, seconds since the epoch.
    """

    snapshot: SnapshotView | None = None
    model: str | None = None
    recipe: str | None = None
    profile: str | None = None
    recipe_hash: str | None = None
    phase: str | None = None
    progress: PhaseView | None = None
    detail: str | None = None
    error: str | None = None
    vendor: str | None = None
    device: str | None = None
    devices: int | None = None
    lost: int | None = None
    max_model_len: int | None = None
    kernels: dict[str, str] = {}
    age_s: float | None = None
    server_time: float | None = None


_FLAT = (GroupView, RequestView, EventView, CounterView, StepView)
"""What comes in numbers and has no parts of its own."""


def _words(raw: object) -> dict[str, str]:
    items = raw.items() if isinstance(raw, Mapping) else ()
    return {clean(str(name)): clean(value) for name, value in items if isinstance(value, str)}


def read_server(raw: Mapping[str, Any]) -> ServerView:
    """Reads the body of ``GET /v1/internal/state``; never raises."""
    server = lenient(ServerView, raw)
    snapshot, told = raw.get("snapshot"), raw.get("facts")
    facts = told if isinstance(told, Mapping) else {}
    return msgspec.structs.replace(
        server,
        snapshot=_snapshot(snapshot) if isinstance(snapshot, Mapping) else None,
        progress=_part(PhaseView, raw.get("progress")),
        max_model_len=count_of(facts.get("max_model_len")),
        kernels=_words(facts.get("kernels")),
    )


def _snapshot(raw: Mapping[str, Any]) -> SnapshotView:
    states = raw.get("states")
    counts = states if isinstance(states, Mapping) else {}
    return msgspec.structs.replace(
        lenient(SnapshotView, raw),
        states={name: count_of(counts.get(name)) for name in STATES},
        groups=tuple(lenient(GroupView, item) for item in items_of(raw.get("groups"))),
        flows=tuple(_flow(item) for item in items_of(raw.get("flows"))),
        counters=lenient(CounterView, raw.get("counters")),
        step=lenient(StepView, raw.get("step")),
        requests=tuple(lenient(RequestView, item) for item in items_of(raw.get("requests"))),
        host=tuple(lenient(GroupView, item) for item in raw["host"]) if isinstance(raw.get("host"), list) else None,
        storage=_part(StorageView, raw.get("storage")),
        headroom=_part(HeadroomView, raw.get("headroom")),
        events=tuple(lenient(EventView, item) for item in items_of(raw.get("events"))),
        latency=_latency(raw.get("latency")),
        acceptance=_part(AcceptanceView, raw.get("acceptance")),
        phase=_part(PhaseView, raw.get("phase")),
    )


def _latency(raw: object) -> LatencyView | None:
    if not isinstance(raw, Mapping):
        return None
    measures = ("ttft_ms", "inter_token_ms", "end_to_end_ms", "queue_ms")
    quantiles = {name: _part(QuantileView, raw.get(name)) for name in measures}
    return msgspec.structs.replace(lenient(LatencyView, raw), **quantiles)


def _part(kind: type[_View], raw: object) -> _View | None:
    """A part that a server may leave out: None where it is not there."""
    return lenient(kind, raw) if isinstance(raw, Mapping) else None


def lenient(kind: type[_View], raw: object) -> _View:
    """The plain fields of a struct; nested ones keep their default and are read by their own functions.

    A struct that is as it should be is read in one go: two hundred requests come with each snapshot.
    """
    if not isinstance(raw, Mapping):
        return kind()
    if kind in _FLAT:
        try:
            return _cleaned(msgspec.convert(raw, kind))
        except msgspec.ValidationError:
            pass
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        value = raw.get(field.name)
        if value is None or isinstance(value, Mapping | list):
            continue
        try:
            converted = msgspec.convert(value, field.type)
        except msgspec.ValidationError:
            continue
        values[field.name] = clean(converted) if isinstance(converted, str) else converted
    return kind(**values)


def _cleaned(struct: _View) -> _View:
    dirty = {
        name: clean(value)
        for name in struct.__struct_fields__
        if isinstance(value := getattr(struct, name), str) and (len(value) > MOST_LETTERS or not value.isprintable())
    }
    return msgspec.structs.replace(struct, **dirty) if dirty else struct


def clean(text: str) -> str:
    """Text from elsewhere (a request id is chosen by a client) without anything that a terminal would obey, and of a
    length that costs nothing to draw: of a longer one the end is left."""
    text = text[-MOST_LETTERS:]
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def items_of(raw: object) -> list[object]:
    """The items of a list; none of anything else."""
    return raw if isinstance(raw, list) else []


def count_of(raw: object) -> int | None:
    """A whole number; None of anything else."""
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


def _flow(raw: object) -> FlowView:
    """A flow is an array on the wire; an object with the same names is read too."""
    if isinstance(raw, list) and len(raw) == 3:
        return lenient(FlowView, dict(zip(("source", "target", "count"), raw, strict=True)))
    return lenient(FlowView, raw)
