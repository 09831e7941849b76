"""GET /v1/internal/state and its stream: what the dashboard reads. The shape is ours and may change with a version."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.messages import EngineFacts
from tokenspeed.messages.snapshot import PhaseSnapshot, StateSnapshot
from tokenspeed.server.context import ServerContext, context_of, json_response
from tokenspeed.server.probes import patience_s
from tokenspeed.server.stream import EventSource, event

SHORTEST_INTERVAL_S = 0.25
LONGEST_INTERVAL_S = 5.0
"""With nothing new the stream repeats itself after so long, so that a reader can tell quiet from dead."""


class StateBody(msgspec.Struct, kw_only=True):
    """What the dashboard reads.

    Attributes:
        vendor: whose device the engine runs on: "cpu", "nvidia", "amd", "npu", or a vendor's own package's; None before
            an engine was ready.
        device, devices: what PyTorch calls it ("cuda" for NVIDIA and AMD), and on how many.
        phase, detail: where the engine stands, and one line on it.
        progress: how far it is in that phase, and since when; there before the first snapshot, too.
        error: why it was lost or failed; "" while all is well.
        lost: how many engines ended unasked so far.
        server_time: seconds since the epoch, by this process's clock.
        age_s: seconds since the snapshot arrived; None without one.
        facts: what the engine said of itself when it became ready.
    """

    model: str
    recipe: str
    profile: str
    recipe_hash: str
    vendor: str | None
    device: str
    devices: int
    phase: str
    progress: PhaseSnapshot
    ready: bool
    detail: str
    error: str
    lost: int
    open_choices: int
    server_time: float
    age_s: float | None
    facts: EngineFacts
    snapshot: StateSnapshot | None


def state_of(context: ServerContext) -> StateBody:
    """Returns the present state: the engine's last snapshot, with what only this process knows."""
    llm, engine = context.llm, context.llm.engine
    config = llm.config
    if llm.stalled_for > patience_s(context):
        engine.stalled(llm.stalled_for, llm.open_choices)
    snapshot, vendor = engine.snapshot, engine.facts.get("vendor")
    if snapshot is not None:
        snapshot = msgspec.structs.replace(
            snapshot,
            events=engine.events.all(),
            latency=context.metrics.latency.snapshot(),
            phase=engine.progress,
            restarts=engine.restarts,
        )
    return StateBody(
        model=config.served_name,
        recipe=config.recipe,
        profile=config.profile,
        recipe_hash=config.recipe_hash,
        vendor=vendor if isinstance(vendor, str) else None,
        device=config.device,
        devices=1 if config.device == "cpu" else config.parallel.tp,  # ranks on the host share it
        phase=engine.phase,
        progress=engine.progress,
        ready=engine.ready,
        detail=engine.status.detail if engine.status is not None else "",
        error=engine.last_error,
        lost=engine.lost,
        open_choices=llm.open_choices,
        server_time=time.time(),
        age_s=engine.snapshot_age,
        facts=engine.facts,
        snapshot=snapshot,
    )


async def state(request: Request) -> Response:
    """The state once."""
    context = context_of(request)
    await context.llm.look()
    return json_response(state_of(context))


async def state_stream(request: Request) -> Response:
    """The state each time it changes, at most four times a second."""
    return EventSource(_events(context_of(request)))


async def _events(context: ServerContext) -> AsyncGenerator[bytes, None]:
    engine = context.llm.engine
    while not context.llm.draining:  # a reader must not keep a server from ending
        await context.llm.look()
        seen = engine.version
        yield event(msgspec.json.encode(state_of(context)))
        await asyncio.sleep(SHORTEST_INTERVAL_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.changed(seen), LONGEST_INTERVAL_S)
