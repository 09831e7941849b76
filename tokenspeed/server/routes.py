"""How routes and error answers are put into an application; the public one and the administration share it."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.server.body import ClientGone
from tokenspeed.server.error_shapes import error_response
from tokenspeed.server.errors import SERVER_ERROR, ApiError
from tokenspeed.server.openapi import describe

Endpoint = Callable[[Request], Awaitable[Response]]

STATUS_CLIENT_GONE = 499


def add_get(
    app: FastAPI, path: str, endpoint: Endpoint, answer: Any, *, queries: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Adds a route without a body; ``queries`` are the schemas of what may stand behind the question mark.

    ``answer`` is what openapi.describe takes, here and below.
    """
    parameters = [*_path_parameters(path), *_parameters("query", queries or {})]
    _add(app, "GET", path, endpoint, {"parameters": parameters})
    describe(app, "GET", path, answer)


def add_delete(app: FastAPI, path: str, endpoint: Endpoint, answer: Any) -> None:
    """Adds a route that removes what its path names."""
    _add(app, "DELETE", path, endpoint, {"parameters": _path_parameters(path)})
    describe(app, "DELETE", path, answer)


def _add(app: FastAPI, method: str, path: str, endpoint: Endpoint, extra: dict[str, Any]) -> None:
    app.add_api_route(
        path, endpoint, methods=[method], response_model=None, response_class=Response, openapi_extra=extra
    )


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return _parameters("path", {name: {"type": "string"} for name in re.findall(r"{(\w+)(?::\w+)?}", path)})


def _parameters(place: str, schemas: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": place, "required": place == "path", "schema": schema} for name, schema in schemas.items()
    ]


def add_post(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    body: type[msgspec.Struct],
    answer: Any,
    *,
    required: bool = True,
    streams: bool = False,
) -> None:
    """Adds a route that reads its own body; the OpenAPI page learns its schema from ``body``."""
    _add(app, "POST", path, endpoint, {})
    describe(app, "POST", path, answer, body=body, required=required, streams=streams)


def add_error_handlers(app: FastAPI) -> None:
    """Has every error answered in the API's shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected)


def _answer(error: ApiError, request: Request) -> Response:
    return error_response(error, request.url.path)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.status in (429, 504):
        request.app.state.context.metrics.refused(str(error.body.error.code))
    return _answer(error, request)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself answers: no such path, or a path that does not know the method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        path = request.url.path
        hint = "; the path has a double slash: does the base URL end in one?" if "//" in path else ""
        return _answer(ApiError(404, f"there is nothing at {path}{hint}", code="not_found"), request)
    if error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow", "")
        text = f"{request.url.path} does not take {request.method}; it takes {allowed}"
        return _answer(ApiError(405, text, code="method_not_allowed", headers=headers), request)
    return _answer(ApiError(error.status_code, str(error.detail), headers=headers), request)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads this; it is for the count."""
    return Response(status_code=STATUS_CLIENT_GONE)


async def _unexpected(request: Request, _error: Exception) -> Response:
    """An error of ours. The server logs it; the client learns that it was not its fault."""
    message = "the server failed on this request; its log has the details"
    return _answer(ApiError(500, message, code="internal_error", kind=SERVER_ERROR), request)
