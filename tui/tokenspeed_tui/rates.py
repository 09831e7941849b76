"""What follows from two snapshots: rates from counter deltas; and from one: the room that is left."""

import msgspec

from tokenspeed_tui.machine import Arrow
from tokenspeed_tui.view import CounterView, GroupView, RequestView, SnapshotView


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second, over ``span_s`` seconds between two snapshots; None where a figure cannot be known.

    ``hit_rate`` is the share of prompt tokens asked of the prefix cache in the span that it had, in [0, 1]; None where
    none were asked for. ``flows`` has the arrows that both snapshots tell of.
    """

    span_s: float | None = None
    prefill_tokens: float | None = None
    decode_tokens: float | None = None
    steps: float | None = None
    finished: float | None = None
    aborted: float | None = None
    retractions: float | None = None
    evictions: float | None = None
    storage_timeouts: float | None = None
    hit_rate: float | None = None
    flows: dict[Arrow, float] = {}


def restarted(old: SnapshotView, new: SnapshotView) -> bool:
    """Whether the engine began anew between the two: its clock went back, or a total fell."""
    pairs = [(old.time, new.time), (old.uptime_s, new.uptime_s)]
    pairs += [(getattr(old.counters, name), getattr(new.counters, name)) for name in CounterView.__struct_fields__]
    return any(before is not None and after is not None and after < before for before, after in pairs)


def compute_rates(old: SnapshotView, new: SnapshotView) -> Rates:
    """The rates between two snapshots; all unknown where no time lies between them or the engine began anew."""
    if old.time is None or new.time is None or new.time <= old.time or restarted(old, new):
        return Rates()
    span = new.time - old.time
    before, after = old.counters, new.counters
    asked = _delta(before.prefix_query_tokens, after.prefix_query_tokens)
    hit = _delta(before.prefix_hit_tokens, after.prefix_hit_tokens)
    return Rates(
        span_s=span,
        prefill_tokens=_per_second(before.prefill_tokens, after.prefill_tokens, span),
        decode_tokens=_per_second(before.decode_tokens, after.decode_tokens, span),
        steps=_per_second(before.steps, after.steps, span),
        finished=_per_second(before.finished, after.finished, span),
        aborted=_per_second(before.aborted, after.aborted, span),
        retractions=_per_second(before.retractions, after.retractions, span),
        evictions=_per_second(before.evictions, after.evictions, span),
        storage_timeouts=_per_second(before.storage_timeouts, after.storage_timeouts, span),
        hit_rate=hit / asked if asked and hit is not None else None,
        flows=_flow_rates(old, new, span),
    )


def total_hit_rate(counters: CounterView) -> float | None:
    """The share of prompt tokens that came from the prefix cache since the engine started."""
    if not counters.prefix_query_tokens or counters.prefix_hit_tokens is None:
        return None
    return counters.prefix_hit_tokens / counters.prefix_query_tokens


def flow_totals(snapshot: SnapshotView) -> dict[Arrow, int]:
    """The arrows of a snapshot with how often each was taken; those with a part missing are left out."""
    return {
        (flow.source, flow.target): flow.count
        for flow in snapshot.flows
        if flow.source is not None and flow.target is not None and flow.count is not None
    }


def _flow_rates(old: SnapshotView, new: SnapshotView, span: float) -> dict[Arrow, float]:
    """An arrow that the older snapshot does not list yet was never taken before it: snapshots may leave zeros out."""
    before = flow_totals(old)
    return {arrow: max(0, count - before.get(arrow, 0)) / span for arrow, count in flow_totals(new).items()}


def _delta(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _per_second(before: int | None, after: int | None, span: float) -> float | None:
    delta = _delta(before, after)
    return None if delta is None else delta / span


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """The room in the KV cache.

    Attributes:
        tokens: what free blocks and evictable cached ones hold, in the tightest full-history group.
        typical_tokens: mean of prompt and output so far over the live requests that hold blocks.
        requests: how many more requests of that size fit.
        largest: the largest request, in tokens, that could be admitted now; None without the engine's bound.
    """

    tokens: int | None = None
    typical_tokens: int | None = None
    requests: int | None = None
    largest: int | None = None


def headroom(snapshot: SnapshotView, max_model_len: int | None = None) -> Headroom:
    """Estimates the room. Only full-history groups count: in the others, blocks do not grow with tokens.

    Pinned blocks are counted as if all of them were cached, so the estimate is on the safe side.
    """
    groups = [group for group in snapshot.groups if group.kind == "full_history"]
    rooms = [(_available(group), group.block_granularity) for group in groups]
    known = [(blocks, rows) for blocks, rows in rooms if blocks is not None and rows]
    if not known or len(known) < len(groups):
        return Headroom()
    tokens = min(blocks * rows for blocks, rows in known)
    largest = None if max_model_len is None else min(tokens, max_model_len)
    typical = _typical_tokens(snapshot.requests)
    if typical is None:
        return Headroom(tokens=tokens, largest=largest)
    fitting = min(blocks // -(-typical // rows) for blocks, rows in known)
    return Headroom(tokens=tokens, typical_tokens=typical, requests=fitting, largest=largest)


def _available(group: GroupView) -> int | None:
    if group.free is None or group.cached is None:
        return None
    return group.free + max(0, group.cached - (group.pinned or 0))


def _typical_tokens(requests: tuple[RequestView, ...]) -> int | None:
    sizes = [
        request.prompt_tokens + request.generated_tokens
        for request in requests
        if request.blocks and request.prompt_tokens is not None and request.generated_tokens is not None
    ]
    return max(1, round(sum(sizes) / len(sizes))) if sizes else None
