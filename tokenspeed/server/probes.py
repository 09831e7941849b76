"""/live, /ready and /progress: three questions that are not the same, and /metrics."""

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.server.context import ServerContext, context_of, json_response

STEP_FACTOR = 10.0
"""The engine counts as stuck only after so many of its mean steps, however patient the threshold is set."""


async def live(request: Request) -> Response:
    """Whether process and loop are alive: 503 once the engine is given up, or has been ready and fell silent."""
    context = context_of(request)
    engine = context.llm.engine
    if engine.gave_up:
        return _down("given up", error=engine.last_error)
    silent = engine.silent_for
    if engine.ready and silent > patience_s(context):
        return _down("hung", error=f"the engine's loop has said nothing for {silent:.0f} s")
    return json_response({"status": "live"})


async def ready(request: Request) -> Response:
    """Whether the engine takes requests: it has produced a real token; 503 with the phase or the cause until then."""
    llm = context_of(request).llm
    engine = llm.engine
    if llm.draining:
        return _down("draining")
    if engine.ready:
        return json_response({"status": "ready", "model": llm.config.served_name})
    status = engine.status
    progress: dict[str, object] = {}
    if status is not None:
        progress = {"done": status.done, "total": status.total, "detail": status.detail}
    if engine.crash_bundle:
        progress["crash_bundle"] = engine.crash_bundle
    return _down(engine.phase, error=engine.last_error, **progress)


async def progress(request: Request) -> Response:
    """Whether work moves: 503 when requests are open and no step has landed for longer than any step takes."""
    context = context_of(request)
    stalled, limit = context.llm.stalled_for, patience_s(context)
    if stalled > limit:
        open_choices = context.llm.open_choices
        return _down("stalled", error=f"{open_choices} requests are open, nothing moved for {stalled:.0f} s")
    return json_response({"status": "moving" if context.llm.open_choices else "idle", "stalled_s": round(stalled, 3)})


async def metrics(request: Request) -> Response:
    """The Prometheus page."""
    content, content_type = context_of(request).metrics.page()
    return Response(content, headers={"content-type": content_type})


def patience_s(context: ServerContext) -> float:
    """Returns how long without progress is too long: the threshold, or several mean steps where those take longer."""
    snapshot = context.llm.engine.snapshot
    if snapshot is None:
        return context.progress_threshold_s
    step = snapshot.step
    mean_ms = step.plan_ms + step.device_ms + step.commit_ms + step.bubble_ms
    return max(context.progress_threshold_s, STEP_FACTOR * mean_ms / 1000.0)


def _down(phase: str, error: str = "", **more: object) -> Response:
    return json_response({"status": "unavailable", "phase": phase, "error": error or None, **more}, status=503)
