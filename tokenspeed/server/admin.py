"""The administration, an application for a port of its own: SGLang's routes that change what the engine does.

Each of them needs POST, and none answers a request that has an Origin: a page in a browser on this machine must not
reach a port just because it is on this machine.
"""

import asyncio
import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tokenspeed.frontend.errors import FrontendError
from tokenspeed.messages import Action
from tokenspeed.messages.snapshot import RequestDetail
from tokenspeed.server import info, inspection, probes, state
from tokenspeed.server.body import read_json
from tokenspeed.server.configuration import configuration_of
from tokenspeed.server.context import ServerContext, context_of, json_response
from tokenspeed.server.errors import PERMISSION, ApiError, from_frontend
from tokenspeed.server.middleware import ApiMiddleware
from tokenspeed.server.openapi import PLAIN
from tokenspeed.server.routes import Endpoint, add_error_handlers, add_get, add_post

_Body = TypeVar("_Body", bound=msgspec.Struct)

FLUSH_AGAIN_S = 0.05
"""Between two tries of a flush that waits for requests to end."""

FLUSHED = "Cache flushed.\n"


class PauseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``abort`` ends all requests with an error; ``in_place`` leaves them where they are, to go on later."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class ContinueRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing to say."""


class FlushRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``timeout``: how long to wait until no request runs or waits, in seconds."""

    timeout: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``rid``: the request's id, as X-Request-Id gave or got it; or ``abort_all``."""

    rid: str = ""
    abort_all: bool = False


def create_admin_app(public: FastAPI) -> FastAPI:
    """Returns the administration of the server that ``public`` is the application of; they share keys and counts."""
    context: ServerContext = public.state.context
    app = FastAPI(
        title="TokenSpeed administration",
        description="docs/api.md says what each route does.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    app.add_middleware(
        ApiMiddleware, metrics=context.metrics, keys=context.keys, allowances=context.allowances, for_admins=True
    )
    add_error_handlers(app)
    posts: list[tuple[str, Endpoint, type[msgspec.Struct], Any]] = [
        ("/flush_cache", flush_cache, FlushRequest, PLAIN),
        ("/pause_generation", pause, PauseRequest, dict[str, str]),
        ("/pause", pause, PauseRequest, dict[str, str]),
        ("/continue_generation", go_on, ContinueRequest, dict[str, str]),
        ("/continue", go_on, ContinueRequest, dict[str, str]),
        ("/abort_request", abort_request, AbortRequest, dict[str, int]),
    ]
    for path, endpoint, body, answer in posts:
        add_post(app, path, endpoint, body, answer, required=False)
    gets: list[tuple[str, Endpoint, Any]] = [
        ("/get_server_info", server_info, dict[str, Any]),
        ("/server_info", server_info, dict[str, Any]),
        ("/get_model_info", info.model_info, info.ModelInfo),
        ("/model_info", info.model_info, info.ModelInfo),
        ("/v1/loads", info.loads, info.LoadsBody),
        ("/version", info.show_version, info.VersionBody),
        ("/live", probes.live, None),
        ("/ready", probes.ready, None),
        ("/progress", probes.progress, None),
        ("/metrics", probes.metrics, PLAIN),
        ("/v1/internal/state", state.state, state.StateBody),
        ("/v1/internal/requests/{request_id:path}", inspection.inspect_request, RequestDetail),
    ]
    for path, get, told in gets:
        add_get(app, path, get, told)
    return app


async def flush_cache(request: Request) -> Response:
    """Forgets every cached prefix; 400 while requests run or wait, after waiting for ``timeout`` seconds."""
    body = await _body(request, FlushRequest)
    until = time.monotonic() + body.timeout
    while refused := await _order(request, "flush_cache"):
        if time.monotonic() >= until:
            raise ApiError(400, f"the cache was not flushed: {refused}", code="not_idle")
        await asyncio.sleep(FLUSH_AGAIN_S)
    return PlainTextResponse(FLUSHED)


async def pause(request: Request) -> Response:
    """Plans no more steps until /continue_generation; requests that come meanwhile wait."""
    body = await _body(request, PauseRequest)
    if body.mode == "retract":
        raise ApiError(
            400,
            "the mode retract is not supported: in_place keeps what was computed, abort ends the requests",
            code="unsupported_field",
            param="mode",
        )
    llm = context_of(request).llm
    if body.mode == "abort":
        llm.abort_requests(None)
    await _order(request, "pause")
    if body.mode == "abort":
        llm.abort_requests(None)  # what was being tokenized meanwhile
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def go_on(request: Request) -> Response:
    """Ends a pause; where there is none nothing changes."""
    await _body(request, ContinueRequest)
    await _order(request, "continue")
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(request: Request) -> Response:
    """Ends one request, or all; it is no error if there is none of that name (any more)."""
    body = await _body(request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise ApiError(400, "give rid, the id of a request, or abort_all: true", code="missing_field", param="rid")
    aborted = context_of(request).llm.abort_requests(None if body.abort_all else body.rid)
    return json_response({"aborted_choices": aborted})


async def server_info(request: Request) -> Response:
    """Every setting (secrets blanked) and the engine's state."""
    context = context_of(request)
    settings = {key.key: key.value for key in configuration_of(context).keys}
    return json_response(info.server_info_of(context, settings))


async def _body(request: Request, kind: type[_Body]) -> _Body:
    if request.headers.get("origin"):
        raise ApiError(
            403,
            "the administration takes nothing from pages in a browser (the request has an Origin header)",
            code="permission_denied",
            kind=PERMISSION,
        )
    context = context_of(request)
    body, ignored = await read_json(request, kind, context.max_body_bytes, optional=True)
    context.metrics.fields_ignored(ignored)
    return body


async def _order(request: Request, action: Action) -> str:
    try:
        return await context_of(request).llm.order(action)
    except FrontendError as error:
        raise from_frontend(error) from error
