"""The HTTP application: routes, error shapes, and what they share."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.async_llm import AsyncLLM
from tokenspeed.server import chat, completions, configuration, models, probes, state, tokenize
from tokenspeed.server.body import ClientGone
from tokenspeed.server.context import ServerContext
from tokenspeed.server.errors import SERVER_ERROR, ApiError
from tokenspeed.server.keys import KeyRing
from tokenspeed.server.middleware import ApiMiddleware
from tokenspeed.server.rates import Allowances
from tokenspeed.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokenspeed.telemetry.metrics import EngineReading, Metrics

Endpoint = Callable[[Request], Awaitable[Response]]

PROGRESS_THRESHOLD_S = 120.0
"""Without progress for so long the engine counts as stuck; above the longest step of a slow CPU by a wide margin."""

STATUS_CLIENT_GONE = 499


def create_app(
    llm: AsyncLLM,
    *,
    progress_threshold_s: float = PROGRESS_THRESHOLD_S,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Returns the application that serves ``llm`` as its configuration says; raises ApiKeyError for a bad key file.

    The application counts for ``llm`` from here on (it becomes its observer). ``clock`` is what keys, rates and
    deadlines go by, in seconds.
    """
    config = llm.config
    metrics = Metrics(lambda: _reading(llm))
    llm.observer = metrics
    keys = KeyRing(config.api.api_key_file, clock=clock)
    allowances = Allowances(config.api.requests_per_minute, config.api.max_concurrent, clock)
    app = FastAPI(
        title="TokenSpeed",
        description="An OpenAI-compatible API. docs/api.md says what each field does.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = ServerContext(llm=llm, metrics=metrics, progress_threshold_s=progress_threshold_s)
    app.add_middleware(ApiMiddleware, metrics=metrics, keys=keys, allowances=allowances)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    _add_routes(app)
    return app


def _add_routes(app: FastAPI) -> None:
    _post(app, "/v1/chat/completions", chat.chat_completions, ChatRequest)
    _post(app, "/v1/completions", completions.completions, CompletionRequest)
    _post(app, "/tokenize", tokenize.tokenize, TokenizeRequest)
    _post(app, "/detokenize", tokenize.detokenize, DetokenizeRequest)
    gets: list[tuple[str, Endpoint]] = [
        ("/v1/models", models.list_models),
        ("/v1/models/{model:path}", models.show_model),
        ("/live", probes.live),
        ("/ready", probes.ready),
        ("/progress", probes.progress),
        ("/metrics", probes.metrics),
        ("/v1/internal/state", state.state),
        ("/v1/internal/state/stream", state.state_stream),
        ("/v1/internal/configuration", configuration.configuration),
    ]
    for path, endpoint in gets:
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)


def _post(app: FastAPI, path: str, endpoint: Endpoint, body: type[msgspec.Struct]) -> None:
    """Adds a route that reads its own body; the schema is written into the OpenAPI page by hand for that reason."""
    schema: dict[str, Any] = msgspec.json.schema(body, ref_template="#/components/schemas/{name}")
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions)}}
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_model=None,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Returns ``schema`` with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _reading(llm: AsyncLLM) -> EngineReading:
    engine = llm.engine
    doubts = engine.facts.get("kernel_doubts")
    return EngineReading(
        ready=engine.ready,
        lost=engine.lost,
        open_choices=llm.open_choices,
        snapshot=engine.snapshot,
        snapshot_age=engine.snapshot_age,
        doubtful_operations=tuple(sorted(doubts)) if isinstance(doubts, dict) else (),
    )


def _answer(error: ApiError) -> Response:
    return Response(error.content(), error.status, error.headers, media_type="application/json")


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself answers: no such path, or a path that does not know the method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        path = request.url.path
        hint = "; the path has a double slash: does the base URL end in one?" if "//" in path else ""
        return _answer(ApiError(404, f"there is nothing at {path}{hint}", code="not_found"))
    if error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow", "")
        text = f"{request.url.path} does not take {request.method}; it takes {allowed}"
        return _answer(ApiError(405, text, code="method_not_allowed", headers=headers))
    return _answer(ApiError(error.status_code, str(error.detail), headers=headers))


async def _client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads this; it is for the count."""
    return Response(status_code=STATUS_CLIENT_GONE)


async def _unexpected(_request: Request, _error: Exception) -> Response:
    """An error of ours. The server logs it; the client learns that it was not its fault."""
    message = "the server failed on this request; its log has the details"
    return _answer(ApiError(500, message, code="internal_error", kind=SERVER_ERROR))
