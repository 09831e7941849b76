"""GET /v1/internal/requests/{request_id}: one request's way through the states, and why it is where it is."""

import re
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.errors import FrontendError
from tokenspeed.messages.snapshot import RequestDetail, RequestSnapshot
from tokenspeed.server.context import ServerContext, context_of, json_response
from tokenspeed.server.errors import ApiError, from_frontend

_PREFIX = re.compile(r"^[a-z]+[-_]")
"""What an endpoint puts before an id: cmpl-, chatcmpl-, resp_, msg_ ..."""


async def inspect_request(request: Request) -> Response:
    """The request of this id or handle: alive, or among the last 64 that ended. An answer's id will do."""
    context = context_of(request)
    return json_response(await detail_of(context, request.path_params["request_id"]))


async def detail_of(context: ServerContext, name: str) -> RequestDetail:
    """Returns what is known of a request; raises ApiError (404) where nothing is, 503 without an engine."""
    try:
        detail = await context.llm.inspect(name)
        if detail is None and (bare := _PREFIX.sub("", name)) != name:
            detail = await context.llm.inspect(bare)
    except FrontendError as error:
        raise from_frontend(error) from error
    except TimeoutError:
        detail = _last_known(context, name)
    if detail is None:
        raise ApiError(
            404,
            f"no request {name[:128]!r} is alive or among the last 64 that ended; "
            "/v1/internal/state lists the live ones",
            code="request_not_found",
        )
    return detail


def _last_known(context: ServerContext, name: str) -> RequestDetail | None:
    """What the last snapshot has of it, while the engine's loop is too busy to answer."""
    snapshot = context.llm.engine.snapshot
    rows: list[RequestSnapshot] = snapshot.requests if snapshot is not None else []
    row = next((row for row in rows if row.request_id == name or str(row.handle) == name), None)
    if row is None:
        return None
    age = context.llm.engine.silent_for
    busy = (
        f"the engine's loop has said nothing for {age:.1f} s: a step takes that long, or it hangs (/progress says "
        "which); this is what was known before"
    )
    fields = msgspec.structs.asdict(row)
    return RequestDetail(**fields, time=time.time(), explain=[busy, *([row.reason] if row.reason else [])])
