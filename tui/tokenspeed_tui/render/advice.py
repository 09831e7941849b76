"""The advisor: what is wrong or could be better, and the knob that mends it, with its present value.

Each rule is a pure function from Facts to a sentence, or None where it does not apply. docs/tuning.md says what each
knob trades.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from tokenspeed_tui.picture import Picture
from tokenspeed_tui.rates import Rates
from tokenspeed_tui.render import text as t
from tokenspeed_tui.view import CounterView, EventView, RequestView, SnapshotView

Severity = Literal["bad", "warn", "hint"]

QUIET_S = 10.0
"""Without a step for so long although there is work, something is wrong: the longest steps take seconds."""
PATIENCE_S = 2.0
"""A request that waits for less is no reason to turn anything."""
STORAGE_PATIENCE_S = 5.0
RECENT_S = 60.0
NAME_WIDTH = 18
BUBBLE_SHARE = 0.25
LEAST_QUERIED_TOKENS = 20_000
"""Prompt tokens after which the hit rate of the prefix cache means something."""
POOR_HIT_RATE = 0.02
MEMORY_DEVIATION = 0.1
WAITING_STATES = ("Submitted", "Retracted", "Prefetching", "Held")


class Advice(NamedTuple):
    """One finding: which rule, how bad, and the sentence."""

    rule: str
    severity: Severity
    text: str


class Facts(NamedTuple):
    """What the rules look at."""

    picture: Picture
    snapshot: SnapshotView
    now: float

    @property
    def counters(self) -> CounterView:
        """Totals of the latest snapshot."""
        return self.snapshot.counters

    @property
    def rates(self) -> Rates:
        """Of the last seconds."""
        return self.picture.rates

    def head(self, reason: str = "") -> RequestView | None:
        """The request that has waited longest for a reason that begins so, if any waits."""
        waiting = [request for request in self.snapshot.requests if request.state in WAITING_STATES]
        return max((one for one in waiting if (one.reason or "").startswith(reason)), key=_age, default=None)

    def setting(self, key: str) -> str | None:
        """The present value of a knob, as the configuration tells it."""
        configuration = self.picture.configuration
        keys = configuration.keys if configuration is not None else ()
        return next((item.value for item in keys if item.key == key), None)

    def knob(self, key: str) -> str:
        """A knob with its present value in words."""
        value = self.setting(key)
        if value is not None and key.endswith("bytes") and value.isdigit():
            value = t.size(int(value))
        return f"{key} (now {t.word(value)})"

    def recent(self, kind: str) -> EventView | None:
        """The newest event of a kind in the last minute."""
        recent = (event for event in reversed(self.picture.events) if (event.time or 0.0) >= self.now - RECENT_S)
        return next((event for event in recent if event.kind == kind), None)


def advise(picture: Picture, now: float) -> tuple[Advice, ...]:
    """Everything the rules find, the worst first; nothing without a snapshot, or while the server is away."""
    if picture.snapshot is None or picture.error:
        return ()
    facts = Facts(picture, picture.snapshot, now)
    found = [(severity, name, rule(facts)) for name, (severity, rule) in RULES.items()]
    said = [Advice(name, severity, text) for severity, name, text in found if text is not None]
    order = ("bad", "warn", "hint")
    return tuple(sorted(said, key=lambda advice: order.index(advice.severity)))


def _age(request: RequestView) -> float:
    return request.age_s or 0.0


def _name(request: RequestView) -> str:
    """A request as the table has it: its handle, by which the scheduler speaks of it, and the end of its id."""
    return f"#{t.count(request.handle)} {t.fitted(t.word(request.request_id), NAME_WIDTH, keep_end=True).strip()}"


def _stuck(facts: Facts) -> str | None:
    snapshot = facts.snapshot
    if not snapshot.has_work or snapshot.paused or snapshot.time is None or snapshot.last_progress is None:
        return None
    idle = snapshot.time - snapshot.last_progress
    if facts.picture.progress.passed is not False and idle < QUIET_S:
        return None
    head = facts.head()
    because = f"; {_name(head)} waits: {head.reason}" if head is not None and head.reason else ""
    return f"STUCK: work is waiting and no step landed for {t.duration(max(0.0, idle))}{because}; see `tokenspeed logs`"


def _paused(facts: Facts) -> str | None:
    if not facts.snapshot.paused:
        return None
    waiting = f", {t.count(facts.snapshot.waiting)} wait" if facts.snapshot.waiting else ""
    return f"an operator paused the engine{waiting}: POST /continue_generation on the admin port goes on"


def _too_small(facts: Facts) -> str | None:
    """The head of the line needs more than the whole pool may ever have free."""
    head = facts.head("capacity")
    rooms = [
        group.total * group.block_granularity
        for group in facts.snapshot.groups
        if group.kind == "full_history" and group.total and group.block_granularity
    ]
    if head is None or _age(head) < PATIENCE_S or not rooms or head.prompt_tokens is None:
        return None
    needed = head.prompt_tokens + (head.output_limit or 0)
    if needed <= min(rooms):
        return None
    return (
        f"{_name(head)} may grow to {t.count(needed)} tokens and the whole pool has {t.count(min(rooms))}: raise "
        f"{facts.knob('kv.bytes')} or lower {facts.knob('scheduler.headroom')}"
    )


def _capacity(facts: Facts) -> str | None:
    head = facts.head("capacity")
    if head is None or _age(head) < PATIENCE_S:
        return None
    if _too_small(facts) is not None:
        return None
    if _has_own_room(facts, head):
        return (
            f"{_name(head)} waits beside free blocks that are reserved for output which others declared: lower "
            f"{facts.knob('scheduler.headroom')}, or let clients ask for less"
        )
    return (
        f"{_name(head)} has waited {t.duration(_age(head))} for room ({head.reason}): raise "
        f"{facts.knob('kv.bytes')} or lower {facts.knob('scheduler.max_seqs')}"
    )


def _has_own_room(facts: Facts, request: RequestView) -> bool:
    """Whether free and evictable blocks hold what the request has by now, in every group that keeps a history."""
    tokens = (request.prompt_tokens or 0) + (request.generated_tokens or 0)
    groups = [group for group in facts.snapshot.groups if group.kind == "full_history" and group.block_granularity]
    return bool(groups) and all(
        (group.free or 0) + (group.cached or 0) - (group.pinned or 0) >= -(-tokens // (group.block_granularity or 1))
        for group in groups
    )


def _retractions(facts: Facts) -> str | None:
    if not facts.rates.retractions:
        return None
    text = (
        f"{t.rate(facts.rates.retractions)} requests a second lose their blocks: raise "
        f"{facts.knob('kv.bytes')} or lower {facts.knob('scheduler.max_seqs')}"
    )
    if facts.snapshot.host is None and facts.counters.recomputed_tokens:
        text += f"; {facts.knob('kv.host_bytes')} would keep what they computed"
    return text


def _rows(facts: Facts) -> str | None:
    if facts.head("no row") is None:
        return None
    fitting = facts.picture.room.requests
    if not fitting:
        return None
    return (
        f"{t.count(facts.snapshot.waiting)} wait for a row while blocks for {t.count(fitting)} more are free: raise "
        f"{facts.knob('scheduler.max_seqs')}"
    )


def _budget(facts: Facts) -> str | None:
    head = facts.head("budget")
    if head is None or _age(head) < PATIENCE_S:
        return None
    return (
        f"prompts wait {t.duration(_age(head))} for their turn in a step: raise {facts.knob('scheduler.chunk')}, "
        "at the price of slower tokens for those that decode"
    )


def _bubble(facts: Facts) -> str | None:
    """Where the device is not the CPU; there a step planned beside another takes the device's own cores."""
    step, server = facts.snapshot.step, facts.picture.server
    if server is None or server.vendor in (None, "cpu") or facts.setting("scheduler.overlap") != "0":
        return None
    if step.bubble_ms is None or not step.device_ms:
        return None
    share = step.bubble_ms / (step.bubble_ms + step.device_ms)
    if share < BUBBLE_SHARE:
        return None
    return f"the device idles {t.percent(share)} of a step between two: set {facts.knob('scheduler.overlap')} to 1"


def _prefix(facts: Facts) -> str | None:
    queried, hit = facts.counters.prefix_query_tokens, facts.counters.prefix_hit_tokens
    if facts.setting("scheduler.prefix_cache") == "false":
        return f"prompts are computed whole: {facts.knob('scheduler.prefix_cache')}"
    if not queried or hit is None or queried < LEAST_QUERIED_TOKENS or hit / queried >= POOR_HIT_RATE:
        return None
    if facts.counters.evictions:
        return (
            f"of {t.count(queried)} prompt tokens {t.percent(hit / queried)} were cached and "
            f"{t.count(facts.counters.evictions)} cached blocks were evicted: raise {facts.knob('kv.bytes')} or "
            f"{facts.knob('kv.host_bytes')}"
        )
    return (
        f"no prefix hits ({t.count(hit)} of {t.count(queried)} prompt tokens): prompts differ within their first "
        f"{facts.knob('kv.granularity')} tokens, often by a date or an id at their beginning"
    )


def _storage(facts: Facts) -> str | None:
    fetching = [request for request in facts.snapshot.requests if request.state == "Prefetching"]
    oldest = max(fetching, key=_age, default=None)
    if oldest is not None and _age(oldest) >= STORAGE_PATIENCE_S:
        out = t.count(facts.snapshot.pending_operations)
        return (
            f"{_name(oldest)} has waited {t.duration(_age(oldest))} for the storage ({out} operations are out): look "
            f"at the disk of {facts.knob('kv.storage_dir')}"
        )
    late = facts.rates.storage_timeouts
    if not late:
        return None
    return f"the storage answers late {t.rate(late)} times a second: look at the disk of {facts.knob('kv.storage_dir')}"


def _slow_reader(facts: Facts) -> str | None:
    event = facts.recent("slow_reader")
    if event is None:
        return None
    return (
        f"{event.text}: it must read faster, or raise {facts.knob('api.stream_buffer_bytes')} or "
        f"{facts.knob('api.slow_reader_s')}"
    )


def _quota(facts: Facts) -> str | None:
    event = facts.recent("refused")
    return f"requests get status 429: {event.text}" if event is not None else None


def _wrong_numbers(facts: Facts) -> str | None:
    if not facts.counters.nan_rows:
        return None
    return (
        f"the model gave NaN in {t.count(facts.counters.nan_rows)} rows: check the weights "
        f"(`tokenspeed pull --repair`), try float32 for {facts.knob('activations')}"
    )


def _failed(facts: Facts) -> str | None:
    if not facts.counters.failed_steps:
        return None
    return (
        f"{t.count(facts.counters.failed_steps)} steps failed since the start: `tokenspeed logs` has the cause of each"
    )


def _restarts(facts: Facts) -> str | None:
    server = facts.picture.server
    lost = server.lost if server is not None else None
    if not lost:
        return None
    engines = f"{t.count(lost)} engine{'s' if lost > 1 else ''}"
    return f"{engines} lost since the start: `tokenspeed env --bundle` packs what is known of the crash"


def _late_work(facts: Facts) -> str | None:
    if not facts.counters.late_kernel_work:
        return None
    return (
        f"{t.count(facts.counters.late_kernel_work)} kernels were chosen or compiled while serving: "
        "`tokenspeed-kernel tune` does it before"
    )


def _memory(facts: Facts) -> str | None:
    configuration = facts.picture.configuration
    if configuration is None:
        return None
    predicted, observed = configuration.predicted.get("sum"), configuration.observed.get("sum")
    if not predicted or not observed or observed <= predicted * (1 + MEMORY_DEVIATION):
        return None
    return (
        f"the engine took {t.size(observed)} where {t.size(predicted)} were planned: lower {facts.knob('kv.bytes')} if "
        "memory gets short"
    )


RULES: dict[str, tuple[Severity, Callable[[Facts], str | None]]] = {
    "stuck": ("bad", _stuck),
    "paused": ("warn", _paused),
    "pool too small": ("bad", _too_small),
    "wrong numbers": ("bad", _wrong_numbers),
    "failed steps": ("bad", _failed),
    "storage": ("warn", _storage),
    "capacity": ("warn", _capacity),
    "retractions": ("warn", _retractions),
    "rows": ("warn", _rows),
    "budget": ("warn", _budget),
    "quota": ("warn", _quota),
    "slow reader": ("warn", _slow_reader),
    "restarts": ("warn", _restarts),
    "bubble": ("hint", _bubble),
    "prefix": ("hint", _prefix),
    "late work": ("hint", _late_work),
    "memory": ("hint", _memory),
}
"""The rules by name: how bad what each finds is, and the rule."""
