"""What happens to every HTTP request: the API key, its bounds, the count. Plain ASGI: streams pass untouched."""

import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.server import deadline, timings
from tokenspeed.server.context import KEY_NAME
from tokenspeed.server.error_shapes import error_response
from tokenspeed.server.errors import AUTHENTICATION, PERMISSION, RATE_LIMIT, ApiError
from tokenspeed.server.keys import KeyRing
from tokenspeed.server.rates import Allowances
from tokenspeed.server.tracing import Tracing
from tokenspeed.telemetry.api_keys import ApiKey
from tokenspeed.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/live", "/ready", "/progress"})
"""The probes need no key: those who probe have none, and the answers say nothing of requests."""

ANYBODY = ApiKey(name="anybody", key="")
"""Whoever uses a server that asks for no key."""


class ApiMiddleware:
    """Asks for the key where keys are set, holds each to its bounds, and counts answers by route and by key.

    Bounds are for what makes work: POST. Reading models, metrics and state wants a key and is not counted.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: KeyRing,
        allowances: Allowances,
        *,
        for_admins: bool = False,
        max_request_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        """``for_admins``: only keys that say so are let in. ``max_request_s`` is the longest any request may take."""
        self._app = app
        self._metrics = metrics
        self._keys = keys
        self._allowances = allowances
        self._for_admins = for_admins
        self._max_request_s = max_request_s
        self._clock = clock
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        trace = self._tracing.begin(scope) if self._tracing is not None and scope["method"] == "POST" else None
        started = time.perf_counter()
        key: ApiKey | None = ANYBODY

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if key is not None and scope["method"] == "POST":
                    bounds = self._allowances.headers(key)
                    told = [(name.encode(), value.encode()) for name, value in bounds.items()]
                    message["headers"] = [*message.get("headers", ()), *told]
            await send(message)

        try:
            if scope["path"] in OPEN_PATHS or not self._keys.required:
                await self._bounded(ANYBODY, scope, receive, counted)
            else:
                key = self._keys.find(Headers(scope=scope))
                if key is None:
                    await self._refuse(_no_key(), scope, receive, counted)
                elif self._for_admins and not key.admin:
                    await self._refuse(_no_admin(key), scope, receive, counted)
                else:
                    await self._bounded(key, scope, receive, counted)
        finally:
            path = getattr(scope.get("route"), "path", "none")
            name = "" if key is None else key.name
            self._metrics.http_request(scope["method"], path, status)
            if name and key is not ANYBODY:
                self._metrics.key_request(name, status)
            if self._tracing is not None and trace is not None:
                self._tracing.end(trace, path, status, name)
            took_ms = 1000 * (time.perf_counter() - started)
            logger.debug("%s %s %d by %s in %.1f ms", scope["method"], path, status, name or "an unknown key", took_ms)

    async def _bounded(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        scope[KEY_NAME] = key.name
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        over = self._allowances.enter(key)
        if over is not None:
            error = ApiError(
                429,
                f"{over.message}; try again in {over.retry_after_s} s",
                code=over.reason,
                kind=RATE_LIMIT,
                headers={"Retry-After": str(over.retry_after_s)},
            )
            self._metrics.over_limit(key.name, over.reason, f"{over.message} ({over.knob})")
            await self._refuse(error, scope, receive, send)
            return
        headers = Headers(scope=scope)
        deadline.arrived(headers.get(deadline.HEADER, ""), self._max_request_s, self._clock)
        timings.asked_by_header.set(headers.get(timings.HEADER, "") in ("1", "true"))
        try:
            await self._app(scope, receive, send)
        finally:
            self._allowances.leave(key)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.refused(error.body.error.code or "none")
        await error_response(error, scope["path"])(scope, receive, send)


def _no_key() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong; send it as Authorization: Bearer KEY or as x-api-key: KEY",
        code="invalid_api_key",
        kind=AUTHENTICATION,
        headers={"WWW-Authenticate": "Bearer"},
    )


def _no_admin(key: ApiKey) -> ApiError:
    return ApiError(
        403,
        f"the key {key.name!r} does not open the administration; write admin behind a key in the key file",
        code="permission_denied",
        kind=PERMISSION,
    )
