"""The engine's state of one moment, as it is sent a few times a second.

Who only counts gets counts: rows of requests and pictures of the pools are made while somebody looks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenspeed.device.handle import StorageUsage
from tokenspeed.engine.details import held_snapshot, row_snapshot, state_name
from tokenspeed.engine.event_log import EventLog
from tokenspeed.engine.held import HeldRequest
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.messages.snapshot import (
    STATES,
    EventKind,
    FlowSnapshot,
    GroupSnapshot,
    HeadroomSnapshot,
    RequestSnapshot,
    StateSnapshot,
    StorageSnapshot,
)
from tokenspeed_scheduler import GroupCounts, Scheduler

MAX_REQUEST_ROWS = 200
MAP_CELLS = 256

BURST_SHARE = 1 / 16
"""So much of a pool evicted between two snapshots is a burst."""


@dataclass(frozen=True)
class Moment:
    """What only the loop knows: its live requests, those whose constraint is compiled and how many wait in all, whether
    it is paused, and the storage tier with its operations that are out."""

    live: Mapping[int, LiveRequest]
    held: Sequence[HeldRequest]
    held_count: int
    paused: bool
    storage: StorageUsage | None
    storage_pending: int


class Snapshots:
    """Takes them. The loop's thread owns it; ``name_of`` is the request id of a handle."""

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: EngineStatistics,
        events: EventLog,
        name_of: Callable[[int], str],
    ) -> None:
        self._scheduler = scheduler
        self._statistics = statistics
        self._events = events
        self._name_of = name_of
        self._evictions: dict[str, int] = {}
        self._in_burst: set[str] = set()

    def take(self, moment: Moment) -> StateSnapshot:
        """Returns the state now. Events in it are those that no snapshot had before."""
        statistics, scheduler = self._statistics, self._scheduler
        complete = statistics.begin_snapshot()
        now = statistics.wall_clock()
        counts = scheduler.snapshot()
        has_host = statistics.specs.host_parents > 0
        rows = self._rows(moment, now) if complete else []
        maps = scheduler.maps(MAP_CELLS) if complete else None
        room = scheduler.headroom()
        self._gather_notes(counts.evictions, counts.host_evictions, counts.groups, counts.host)
        return StateSnapshot(
            time=now,
            uptime_s=statistics.uptime_s,
            role=statistics.role,
            states={
                name: None if count < 0 else count for name, count in zip(STATES, counts.states.tolist(), strict=True)
            },
            groups=self._pool(counts.groups, maps.device if maps is not None else ()),
            host=self._pool(counts.host, maps.host if maps is not None else ()) if has_host else None,
            pending_operations=counts.pending_operations,
            flows=[
                FlowSnapshot(state_name(source), state_name(target), count) for source, target, count in counts.flows
            ],
            counters=statistics.counters(counts),
            step=statistics.step(),
            running=counts.running,
            waiting=counts.waiting + moment.held_count,
            held=moment.held_count,
            paused=moment.paused,
            last_progress=statistics.last_progress,
            has_work=scheduler.has_work() or moment.held_count > 0,
            complete=complete,
            requests=rows,
            requests_omitted=max(0, counts.live + len(moment.held) - len(rows)),
            storage=_storage(moment),
            headroom=HeadroomSnapshot(
                tokens=room.tokens,
                largest=room.largest,
                requests=room.requests,
                typical_tokens=room.typical_tokens,
            ),
            events=self._events.take(),
        )

    def _rows(self, moment: Moment, now: float) -> list[RequestSnapshot]:
        """Those that are held came before the scheduler, so they wait longest."""
        held = [held_snapshot(one, now) for one in moment.held[:MAX_REQUEST_ROWS]]
        rows = self._scheduler.requests(MAX_REQUEST_ROWS - len(held))
        return held + [row_snapshot(row, moment.live.get(row.handle), now, moment.paused) for row in rows]

    def _pool(self, counts: Sequence[GroupCounts], maps: Sequence[str]) -> list[GroupSnapshot]:
        return [
            GroupSnapshot(
                group_id=group.group_id,
                kind=facts.kind,
                block_granularity=facts.block_granularity,
                bytes_per_block=facts.bytes_per_block,
                total=group.total,
                held=group.held,
                cached=group.cached,
                free=group.free,
                pinned=group.pinned,
                elsewhere=group.elsewhere,
                map=maps[index] if maps else "",
            )
            for index, (group, facts) in enumerate(zip(counts, self._statistics.specs.groups, strict=True))
        ]

    def _gather_notes(
        self, evictions: int, host_evictions: int, groups: Sequence[GroupCounts], host: Sequence[GroupCounts]
    ) -> None:
        for note in self._scheduler.take_notes():
            kind: EventKind = "retraction" if note.kind == "retraction" else "storage_timeout"
            self._events.add(kind, note.text, self._name_of(note.handle), note.time)
        self._burst("KV blocks of the device (kv.bytes)", evictions, groups)
        self._burst("blocks of the host pool (kv.host_bytes)", host_evictions, host)

    def _burst(self, pool: str, evictions: int, groups: Sequence[GroupCounts]) -> None:
        """A burst is told once, when it begins; it ends with a snapshot in which little was evicted."""
        gone = evictions - self._evictions.get(pool, 0)
        self._evictions[pool] = evictions
        most = max((group.total for group in groups), default=0)
        if not gone or gone < most * BURST_SHARE:
            self._in_burst.discard(pool)
        elif pool not in self._in_burst:
            self._in_burst.add(pool)
            text = f"{gone} cached {pool} gave way at once, of {most}: what needs room now takes it from prefixes"
            self._events.add("eviction_burst", text)


def _storage(moment: Moment) -> StorageSnapshot | None:
    usage = moment.storage
    if usage is None:
        return None
    return StorageSnapshot(
        blocks=usage.blocks, bytes=usage.bytes, limit_bytes=usage.limit_bytes, pending=moment.storage_pending
    )
