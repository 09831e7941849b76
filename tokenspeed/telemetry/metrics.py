"""Prometheus metrics. Every name is listed in METRIC_NAMES (a test pins it to the page and to docs/api.md).

Two sources: what the API process sees itself is counted as it happens (``Metrics`` is the frontend's observer); what
the engine reports is read from its last snapshot when somebody scrapes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tokenspeed.messages.snapshot import CounterSnapshot, EventKind, StateSnapshot
from tokenspeed.telemetry.latency import LatencyWindow
from tokenspeed.telemetry.logs import DROPS

logger = logging.getLogger(__name__)

_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

MAX_KEY_NAMES = 100
"""So many names of keys have series of their own."""

_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

ENGINE_COUNTERS = {
    "rounds": "Rounds of the event loop",
    "steps": "Steps of the device",
    "prefill_tokens": "Prompt tokens computed",
    "decode_tokens": "Tokens decoded",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "finished": "Requests that ended by themselves",
    "aborted": "Requests that were aborted",
    "retractions": "Retractions of running requests for want of KV blocks",
    "nan_rows": "Rows whose logits held NaN",
    "failed_steps": "Steps whose forward raised",
    "ignored_results": "Results that came for requests already gone",
    "host_hit_tokens": "Prompt tokens that came from the host pool",
    "storage_hit_tokens": "Prompt tokens that came from the storage",
    "evictions": "Cached KV blocks that gave way to others",
    "host_evictions": "Blocks of the host pool that gave way to others",
    "image_blocks": "Blocks saved to the host for retracted requests",
    "restores": "Retracted requests brought back from the host",
    "recomputed_tokens": "Tokens that retractions without an image lost",
    "storage_timeouts": "Storage lookups that took too long and were not waited for",
    "failed_copies": "Copies between device and host of which a block failed",
    "late_kernel_work": "Kernels bound, tuned or compiled while serving; the log names them",
}
"""Field of CounterSnapshot to the help text of ``tokenspeed_engine_<field>_total``; each engine begins at 0."""

METRIC_NAMES = (
    "tokenspeed_http_requests_total",
    "tokenspeed_key_requests_total",
    "tokenspeed_requests_refused_total",
    "tokenspeed_streams_cut_total",
    "tokenspeed_ignored_fields_total",
    "tokenspeed_choices_started_total",
    "tokenspeed_choices_finished_total",
    "tokenspeed_prompt_tokens_total",
    "tokenspeed_cached_prompt_tokens_total",
    "tokenspeed_generation_tokens_total",
    "tokenspeed_time_to_first_token_seconds",
    "tokenspeed_inter_token_seconds",
    "tokenspeed_choice_seconds",
    "tokenspeed_queue_seconds",
    "tokenspeed_prompt_length_tokens",
    "tokenspeed_cached_length_tokens",
    "tokenspeed_output_length_tokens",
    "tokenspeed_open_choices",
    "tokenspeed_engine_ready",
    "tokenspeed_engine_lost_total",
    "tokenspeed_engine_restarts_total",
    "tokenspeed_events_total",
    "tokenspeed_log_records_dropped_total",
    "tokenspeed_doubtful_kernels",
    "tokenspeed_snapshot_age_seconds",
    "tokenspeed_requests_running",
    "tokenspeed_requests_waiting",
    "tokenspeed_requests",
    "tokenspeed_state_transitions_total",
    "tokenspeed_requests_held",
    "tokenspeed_engine_paused",
    "tokenspeed_kv_blocks",
    "tokenspeed_kv_block_bytes",
    "tokenspeed_host_blocks",
    "tokenspeed_storage_bytes",
    "tokenspeed_storage_blocks",
    "tokenspeed_storage_operations",
    "tokenspeed_headroom_tokens",
    "tokenspeed_headroom_largest_tokens",
    "tokenspeed_headroom_requests",
    "tokenspeed_step_seconds",
    *(f"tokenspeed_engine_{name}_total" for name in ENGINE_COUNTERS),
)


@dataclass(frozen=True, kw_only=True)
class EngineReading:
    """What the API process knows of the engine at one moment; ``snapshot`` is None before the first.

    ``doubtful_operations``: those whose kernel is the reference or was not verified on this platform. ``events`` counts
    them by kind.
    """

    ready: bool
    lost: int
    open_choices: int
    snapshot: StateSnapshot | None
    snapshot_age: float | None
    doubtful_operations: tuple[str, ...]
    restarts: int = 0
    events: Mapping[EventKind, int] = field(default_factory=dict)


Tell = Callable[[str, EventKind, str], None]
"""Hears what it is about (so that repetitions are known), the kind of the event, and the event in a sentence."""


def _to_nobody(about: str, kind: EventKind, text: str) -> None:
    """Nobody listens."""


CUTS = {
    "buffer": "more of an answer waited than api.stream_buffer_bytes allows: its reader is too slow, and it was cut",
    "stalled": "a reader took nothing for longer than api.slow_reader_s: its connection was cut",
}
"""Why an answer is cut, in words."""


class Metrics:
    """The registry of one server, and the observer of its frontend. Times are seconds."""

    def __init__(self, read_engine: Callable[[], EngineReading], tell: Tell = _to_nobody) -> None:
        """``tell`` hears what is worth an event."""
        self._tell = tell
        self.latency = LatencyWindow()
        # a second series for each counter, of which nobody makes use
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._http = self._counter("http_requests", "HTTP requests answered", "method", "path", "status")
        self._by_key = self._counter("key_requests", "HTTP requests answered, by the API key's name", "key", "status")
        self._key_names: set[str] = set()
        self._refused = self._counter("requests_refused", "Requests refused before they made work", "reason")
        self._cut = self._counter("streams_cut", "Answers cut because their reader was too slow", "reason")
        self._warned: set[str] = set()
        self._ignored = self._counter("ignored_fields", "Request fields accepted without effect", "field")
        self._started = self._counter("choices_started", "Choices handed to the engine")
        self._finished = self._counter("choices_finished", "Choices ended, by reason", "reason")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of all requests, cached ones included")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens that came from the prefix cache")
        self._generated = self._counter("generation_tokens", "Tokens received from the engine")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token", _LONG_S
        )
        self._between = self._histogram("inter_token_seconds", "Between the tokens of a choice", _SHORT_S)
        self._whole = self._histogram("choice_seconds", "From submission to the end of a choice", _LONG_S)
        self._queue = self._histogram(
            "queue_seconds", "From the engine's receipt of a choice to its first step", _LONG_S
        )
        self._prompt_length = self._histogram("prompt_length_tokens", "Tokens of a prompt", _TOKENS)
        self._cached_length = self._histogram(
            "cached_length_tokens", "Prompt tokens of a choice that came from the prefix cache", _TOKENS
        )
        self._output_length = self._histogram("output_length_tokens", "Tokens of a choice", _TOKENS)
        self.registry.register(_EngineCollector(read_engine))
        ProcessCollector(namespace="tokenspeed", registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tokenspeed_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tokenspeed_{name}", text, buckets=buckets, registry=self.registry)

    def page(self) -> tuple[bytes, str]:
        """Returns the page for a scraper and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    # What the server tells.

    def http_request(self, method: str, path: str, status: int) -> None:
        """``path`` is the route's own path, not the client's, so that the number of label values stays small."""
        self._http.labels(method, path, str(status)).inc()

    def key_request(self, name: str, status: int) -> None:
        """``name`` of a key; after MAX_KEY_NAMES of them, which rotation may bring, all others count as one."""
        if name not in self._key_names and len(self._key_names) >= MAX_KEY_NAMES:
            name = "other"
        self._key_names.add(name)
        self._by_key.labels(name, str(status)).inc()

    def refused(self, reason: str) -> None:
        """``reason`` is an error code, of which there are few."""
        self._refused.labels(reason).inc()

    def stream_cut(self, reason: str) -> None:
        """``reason`` is "stalled" (took nothing for long) or "buffer" (too much waited)."""
        self._cut.labels(reason).inc()
        self._tell(reason, "slow_reader", CUTS[reason])

    def over_limit(self, key: str, reason: str, text: str) -> None:
        """A key asked for more than it may; the refusal itself is counted by ``refused``."""
        self._tell(f"{key} {reason}", "refused", text)

    def fields_ignored(self, names: Iterable[str]) -> None:
        """Counts fields that were accepted without effect; the first use of each is also logged."""
        for name in names:
            self._ignored.labels(name).inc()
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("a request has the field %s, which has no effect here (docs/api.md says why)", name)

    # What the frontend tells.

    def submitted(self, choices: int, prompt_tokens: int) -> None:
        self._started.inc(choices)
        self._prompt.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)

    def first_token(self, waited: float, cached_tokens: int) -> None:
        self._first_token.observe(waited)
        self.latency.first_token.add(waited)
        self._cached.inc(cached_tokens)
        self._cached_length.observe(cached_tokens)

    def tokens(self, count: int, since_last: float | None) -> None:
        self._generated.inc(count)
        if since_last is not None:
            self._between.observe(since_last / count)
            self.latency.between.add(since_last / count, count)

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)
        self.latency.queue.add(seconds)

    def finished(self, reason: str, took: float, tokens: int) -> None:
        self._output_length.observe(tokens)
        self._finished.labels(reason).inc()
        self._whole.observe(took)
        self.latency.whole.add(took)


class _EngineCollector:
    """Reads the engine's last snapshot at each scrape; what does not exist is left out, never 0."""

    def __init__(self, read: Callable[[], EngineReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        yield _gauge("open_choices", "Choices the engine works on for this server", reading.open_choices)
        yield _gauge("engine_ready", "1 while the engine takes requests", float(reading.ready))
        lost = CounterMetricFamily("tokenspeed_engine_lost", "Engines that ended unasked")
        lost.add_metric([], reading.lost)
        yield lost
        restarts = CounterMetricFamily("tokenspeed_engine_restarts", "Engines that were ready after another was lost")
        restarts.add_metric([], reading.restarts)
        yield restarts
        yield _events(reading.events)
        yield _dropped_records()
        doubtful = GaugeMetricFamily(
            "tokenspeed_doubtful_kernels",
            "1 where an operation runs on an unverified or reference kernel",
            labels=["operation"],
        )
        for operation in reading.doubtful_operations:
            doubtful.add_metric([operation], 1.0)
        yield doubtful
        if reading.snapshot is None:
            return
        yield _gauge("snapshot_age_seconds", "Age of the engine's last snapshot", reading.snapshot_age or 0.0)
        yield from _requests(reading.snapshot)
        yield from _blocks(reading.snapshot)
        yield from _storage(reading.snapshot)
        yield from _headroom(reading.snapshot)
        yield _step(reading.snapshot)
        yield from _counters(reading.snapshot.counters)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tokenspeed_{name}", text, value=value)


def _dropped_records() -> Metric:
    dropped = CounterMetricFamily(
        "tokenspeed_log_records_dropped", "Log records dropped because their reader was too slow", labels=["process"]
    )
    for process, count in ({"api": 0, "engine": 0} | DROPS.counts()).items():
        dropped.add_metric([process], count)
    return dropped


def _requests(snapshot: StateSnapshot) -> Iterator[Metric]:
    yield _gauge("requests_running", "Requests that run", snapshot.running)
    yield _gauge("requests_waiting", "Requests that wait", snapshot.waiting)
    yield _gauge("requests_held", "Of those that wait, whose constraint is being compiled", snapshot.held)
    yield _gauge("engine_paused", "1 while an operator has paused the engine", float(snapshot.paused))
    states = GaugeMetricFamily("tokenspeed_requests", "Live requests in each state", labels=["state"])
    for state, count in snapshot.states.items():
        if count is not None:
            states.add_metric([state], count)
    yield states
    flows = CounterMetricFamily(
        "tokenspeed_state_transitions", "Requests that went from one state to another", labels=["source", "target"]
    )
    for flow in snapshot.flows:
        flows.add_metric([flow.source, flow.target], flow.count)
    yield flows


def _blocks(snapshot: StateSnapshot) -> Iterator[Metric]:
    text = "blocks of a cache group; held + cached + free + elsewhere = total, pinned are among held and cached"
    sizes = GaugeMetricFamily("tokenspeed_kv_block_bytes", "Bytes of one KV block of a cache group", labels=["group"])
    for name, pool, groups in (("kv", "KV", snapshot.groups), ("host", "Host", snapshot.host)):
        blocks = GaugeMetricFamily(f"tokenspeed_{name}_blocks", f"{pool} {text}", labels=["group", "kind"])
        for group in groups or ():
            for kind in ("total", "held", "cached", "free", "pinned", "elsewhere"):
                blocks.add_metric([group.group_id, kind], getattr(group, kind))
        if groups is not None:
            yield blocks
    for group in snapshot.groups:
        sizes.add_metric([group.group_id], group.bytes_per_block)
    yield sizes


def _storage(snapshot: StateSnapshot) -> Iterator[Metric]:
    storage = snapshot.storage
    if storage is None:
        return
    size = GaugeMetricFamily("tokenspeed_storage_bytes", "Bytes of the storage tier: used and limit", labels=["kind"])
    size.add_metric(["used"], storage.bytes)
    size.add_metric(["limit"], storage.limit_bytes)
    yield size
    yield _gauge("storage_blocks", "Blocks in the storage tier", storage.blocks)
    yield _gauge("storage_operations", "Storage operations that are out", storage.pending)


def _headroom(snapshot: StateSnapshot) -> Iterator[Metric]:
    room = snapshot.headroom
    if room is None:
        return
    yield _gauge("headroom_tokens", "Tokens that free and evictable KV blocks hold", room.tokens)
    yield _gauge("headroom_largest_tokens", "Prompt and output of the largest request that fits now", room.largest)
    yield _gauge("headroom_requests", "Requests of the present mean size that fit now", room.requests)


def _events(counts: Mapping[EventKind, int]) -> Metric:
    events = CounterMetricFamily("tokenspeed_events", "Events of the dashboard's log", labels=["kind"])
    for kind in get_args(EventKind):
        events.add_metric([kind], counts.get(kind, 0))
    return events


def _step(snapshot: StateSnapshot) -> Metric:
    step = GaugeMetricFamily("tokenspeed_step_seconds", "Mean time of the recent steps, by part", labels=["part"])
    for part in ("plan", "device", "commit", "bubble"):
        step.add_metric([part], getattr(snapshot.step, f"{part}_ms") / 1000.0)
    return step


def _counters(counters: CounterSnapshot) -> Iterator[Metric]:
    for name, text in ENGINE_COUNTERS.items():
        family = CounterMetricFamily(f"tokenspeed_engine_{name}", text)
        family.add_metric([], getattr(counters, name))
        yield family
