"""What the frontend knows of the engine: its phase, whether it is ready, why not, and its last snapshot."""

import asyncio
import time
from collections import deque
from typing import Literal

from tokenspeed.frontend.errors import EngineUnavailable
from tokenspeed.frontend.events import EventRing
from tokenspeed.messages import EngineFacts, EngineStatus, Phase
from tokenspeed.messages.snapshot import PhaseSnapshot, StateSnapshot

RATE_SNAPSHOTS = 16
"""Snapshots that a rate is taken over: three seconds while work moves, a quarter of a minute while nothing does."""


class EngineState:
    """Fed by the engine's messages, read by the probes, the metrics and the dashboard.

    Attributes:
        phase: the engine's own phase; "starting" before its first word, "restarting" after it was lost.
        status: its last status message, for progress within the phase; None before the first.
        facts: what it said of itself when it became ready.
        last_error: why it was lost or failed; kept until the next engine is ready.
        crash_bundle: the folder with what is known of the last end, "" without one; kept as long as last_error.
        gave_up: it will not be started again.
        lost: how many engines were lost so far.
        version: counts the changes of phase and the snapshots.
        snapshot: the last one, None before the first.
        snapshots: how many came so far.
        restarts: engines that were ready after another was lost.
        events: what happened, of all engines and of this process.
        phase_since: seconds since the epoch when the phase began.
        moved_at: monotonic time when work last moved, as far as can be told from here.
    """

    def __init__(self) -> None:
        self.phase: Phase | Literal["starting", "restarting"] = "starting"
        self.status: EngineStatus | None = None
        self.facts: EngineFacts = {}
        self.last_error = ""
        self.crash_bundle = ""
        self.gave_up = False
        self.lost = 0
        self.version = 0
        self.snapshot: StateSnapshot | None = None
        self.snapshots = 0
        self.restarts = 0
        self.events = EventRing()
        self.phase_since = time.time()
        self.moved_at = time.monotonic()
        self._lost_at = 0.0
        self._stuck_since = 0.0
        self._heard_at = time.monotonic()
        self._snapshot_at = 0.0
        self._decoded: deque[tuple[float, int]] = deque(maxlen=RATE_SNAPSHOTS)
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.phase == "ready"

    @property
    def snapshot_age(self) -> float | None:
        """Seconds since the last snapshot arrived; None without one."""
        return time.monotonic() - self._snapshot_at if self.snapshot is not None else None

    @property
    def decode_rate(self) -> float:
        """Tokens decoded a second, over the last RATE_SNAPSHOTS snapshots (a few seconds); 0 before there are two."""
        if len(self._decoded) < 2:
            return 0.0
        (began, before), (ended, after) = self._decoded[0], self._decoded[-1]
        return (after - before) / (ended - began) if ended > began else 0.0

    @property
    def progress(self) -> PhaseSnapshot:
        """Its phase, and how far it is in it."""
        done, total = (self.status.done, self.status.total) if self.status is not None else (0, 0)
        return PhaseSnapshot(name=self.phase, done=done, total=total, since=self.phase_since)

    @property
    def silent_for(self) -> float:
        """Seconds since its last message of any kind."""
        return time.monotonic() - self._heard_at

    def heard(self) -> None:
        self._heard_at = time.monotonic()

    def moved(self) -> None:
        """Work moved, or began: before that nothing could move."""
        self.moved_at = time.monotonic()

    def set_status(self, status: EngineStatus) -> None:
        self.heard()
        self.status = status
        self._enter(status.phase)
        if status.phase == "ready":
            if self._lost_at:
                self.restarts += 1
                self.events.add("restart", f"an engine is ready again after {time.monotonic() - self._lost_at:.1f} s")
                self._lost_at = 0.0
            self.facts = dict(status.facts)
            self.last_error = ""
            self.crash_bundle = ""
            self.gave_up = False
        elif status.phase == "failed":
            self.last_error = status.error or status.detail or "the engine failed without saying why"
        self.notify()

    def set_snapshot(self, snapshot: StateSnapshot) -> None:
        self.heard()
        if self.snapshot is None or snapshot.last_progress != self.snapshot.last_progress:
            self.moved()
        self.snapshot = snapshot
        self.snapshots += 1
        self.events.take(snapshot.events)
        self._decoded.append((snapshot.time, snapshot.counters.decode_tokens))
        self._snapshot_at = self._heard_at
        self.notify()

    def set_lost(self, cause: str) -> None:
        self.lost += 1
        self.snapshot = None
        self._decoded.clear()
        self.status = None
        self._enter("restarting")
        self._lost_at = self._lost_at or time.monotonic()
        self.events.add("restart", f"{cause}; its requests ended with an error, and another engine is started")
        self.last_error = cause
        self.crash_bundle = ""
        self.notify()

    def set_crash_bundle(self, path: str) -> None:
        """Where the last end is described; no news once an engine is ready again."""
        if not self.ready:
            self.crash_bundle = path
            self.notify()

    def set_given_up(self, cause: str) -> None:
        self._enter("failed")
        self.events.add("restart", f"the engine is not started again: {cause}")
        self.last_error = cause
        self.gave_up = True
        self.notify()

    def stalled(self, seconds: float, open_choices: int) -> None:
        """Nothing moved for so long, which is too long: an event, once until something moves."""
        if self._stuck_since != self.moved_at:
            self._stuck_since = self.moved_at
            self.events.add("stuck", f"{open_choices} requests are open, and nothing has moved for {seconds:.0f} s")

    def _enter(self, phase: "Phase | Literal['restarting']") -> None:
        if phase != self.phase:
            self.phase_since = time.time()
        self.phase = phase

    async def changed(self, since: int | None = None) -> None:
        """Returns when the next change of phase or the next snapshot comes; at once where ``version`` is no longer
        ``since``, so that nothing is missed between a look and the wait."""
        if since is None or since == self.version:
            await self._changed.wait()

    async def wait_ready(self) -> None:
        """Returns once the engine takes requests; raises EngineUnavailable when it never will."""
        while not self.ready:
            if self.gave_up or self.phase == "stopped":
                raise self.unavailable()
            await self.changed()

    def unavailable(self) -> EngineUnavailable:
        """Returns the error for a request that comes while the engine is not ready."""
        if self.phase == "draining":
            return EngineUnavailable("the server is shutting down and takes no new requests", "draining")
        if self.gave_up or self.phase in ("failed", "stopped"):
            why = f": {self.last_error}" if self.last_error else ""
            return EngineUnavailable(f"the engine is not running{why}", "engine_unavailable")
        why = f" after: {self.last_error}" if self.last_error else ""
        return EngineUnavailable(f"the engine is not ready yet (phase: {self.phase}){why}", "engine_not_ready")

    def notify(self) -> None:
        """Counts a change and wakes everybody who waits for one; the next to wait get a new event."""
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
