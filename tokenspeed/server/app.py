"""The HTTP application: routes, error shapes, and what they share."""

import os
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from tokenspeed.frontend.async_llm import AsyncLLM
from tokenspeed.messages.snapshot import RequestDetail
from tokenspeed.server import (
    chat,
    completions,
    configuration,
    embeddings,
    info,
    inspection,
    models,
    probes,
    state,
    tokenize,
)
from tokenspeed.server.anthropic import routes as anthropic
from tokenspeed.server.anthropic.answers import MessageBody, TokenCount
from tokenspeed.server.anthropic.requests import CountTokensRequest, MessagesRequest
from tokenspeed.server.context import ServerContext
from tokenspeed.server.embeddings import EmbeddingsRequest
from tokenspeed.server.generate_api import routes as generate
from tokenspeed.server.generate_api.answers import GenerateBody
from tokenspeed.server.generate_api.requests import GenerateRequest
from tokenspeed.server.keys import KeyRing
from tokenspeed.server.middleware import ApiMiddleware
from tokenspeed.server.openapi import EVENTS, PLAIN
from tokenspeed.server.rates import Allowances
from tokenspeed.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokenspeed.server.responses import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from tokenspeed.server.responses_api import routes as responses
from tokenspeed.server.responses_api.answers import Deleted, ItemList, ResponseBody
from tokenspeed.server.responses_api.requests import ResponsesRequest
from tokenspeed.server.responses_api.store import ResponseStore
from tokenspeed.server.routes import Endpoint, add_delete, add_error_handlers, add_get
from tokenspeed.server.routes import add_post as _post
from tokenspeed.server.tracing import make_tracing
from tokenspeed.telemetry.metrics import EngineReading, Metrics

PROGRESS_THRESHOLD_S = 120.0
"""Without progress for so long the engine counts as stuck; above the longest step of a slow CPU by a wide margin."""


def create_app(
    llm: AsyncLLM,
    *,
    progress_threshold_s: float = PROGRESS_THRESHOLD_S,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Returns the application that serves ``llm`` as its configuration says; raises ApiKeyError for a bad key file
    and TracingError where spans are asked for and cannot be made.

    The application counts for ``llm`` from here on (it becomes its observer). ``clock`` is what keys, rates and
    deadlines go by, in seconds.
    """
    config = llm.config
    metrics = Metrics(lambda: _reading(llm), llm.engine.events.add_seldom)
    llm.observer = metrics
    keys = KeyRing(config.api.api_key_file, clock=clock)
    tracing = make_tracing(config.api.otlp_endpoint, os.environ)
    if tracing is not None:
        llm.on_start = tracing.note
    allowances = Allowances(config.api.requests_per_minute, config.api.max_concurrent, clock)
    app = FastAPI(
        title="TokenSpeed",
        description="An OpenAI-compatible API. docs/api.md says what each field does.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = ServerContext(
        llm=llm,
        metrics=metrics,
        progress_threshold_s=progress_threshold_s,
        keys=keys,
        allowances=allowances,
        responses=ResponseStore(config.api.response_store_count, config.api.response_store_bytes),
        tracing=tracing,
    )
    app.add_middleware(
        ApiMiddleware,
        metrics=metrics,
        keys=keys,
        allowances=allowances,
        max_request_s=config.api.max_request_s,
        clock=clock,
        tracing=tracing,
    )
    add_error_handlers(app)
    _add_routes(app)
    return app


def _add_routes(app: FastAPI) -> None:
    _post(app, "/v1/chat/completions", chat.chat_completions, ChatRequest, ChatResponse, streams=True)
    _post(app, "/v1/completions", completions.completions, CompletionRequest, CompletionResponse, streams=True)
    _post(app, "/tokenize", tokenize.tokenize, TokenizeRequest, TokenizeResponse)
    _post(app, "/detokenize", tokenize.detokenize, DetokenizeRequest, DetokenizeResponse)
    _post(app, "/v1/messages", anthropic.messages, MessagesRequest, MessageBody, streams=True)
    _post(app, "/v1/messages/count_tokens", anthropic.count_tokens, CountTokensRequest, TokenCount)
    _post(app, "/v1/responses", responses.create, ResponsesRequest, ResponseBody, streams=True)
    _post(app, "/generate", generate.generate, GenerateRequest, GenerateBody | list[GenerateBody], streams=True)
    _post(app, "/v1/embeddings", embeddings.embeddings, EmbeddingsRequest, embeddings.EmbeddingsResponse)
    gets: list[tuple[str, Endpoint, Any]] = [
        ("/v1/responses/{response_id}", responses.retrieve, ResponseBody),
        ("/v1/models", models.list_models, ModelList),
        ("/v1/models/{model:path}", models.show_model, ModelCard),
        ("/version", info.show_version, info.VersionBody),
        ("/get_model_info", info.model_info, info.ModelInfo),
        ("/v1/loads", info.loads, info.LoadsBody),
        ("/live", probes.live, None),
        ("/ready", probes.ready, None),
        ("/progress", probes.progress, None),
        ("/metrics", probes.metrics, PLAIN),
        ("/v1/internal/state", state.state, state.StateBody),
        ("/v1/internal/state/stream", state.state_stream, EVENTS),
        ("/v1/internal/requests/{request_id:path}", inspection.inspect_request, RequestDetail),
        ("/v1/internal/configuration", configuration.configuration, configuration.ConfigurationBody),
    ]
    for path, endpoint, answer in gets:
        add_get(app, path, endpoint, answer)
    add_delete(app, "/v1/responses/{response_id}", responses.delete, Deleted)
    items = "/v1/responses/{response_id}/input_items"
    add_get(app, items, responses.input_items, ItemList, queries=responses.QUERIES)


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
        restarts=engine.restarts,
        events=engine.events.counts,
    )
