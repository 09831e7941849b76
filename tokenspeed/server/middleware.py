"""What happens to every HTTP request: the API key, and the count. Plain ASGI, so that streams pass untouched."""

import hashlib
import hmac
import logging
import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.server.errors import AUTHENTICATION, ApiError
from tokenspeed.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/live", "/ready", "/progress"})
"""The probes need no key: those who probe have none, and the answers say nothing of requests."""


class ApiKeyError(ValueError):
    """A key file that cannot be used; the message names it."""


def read_api_keys(path: str) -> frozenset[bytes]:
    """Returns the digests of the keys in a file, one key a line; lines that are empty or begin with # are skipped.

    Raises ApiKeyError where the file cannot be read or holds no key: a server that was told to ask for keys must not
    start without any.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeyError(f"the API key file {path} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ApiKeyError(f"the API key file {path} holds no key; write one key a line")
    return frozenset(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ApiMiddleware:
    """Asks for the key where keys are set, and counts answers by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics, keys: frozenset[bytes]) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        started = time.perf_counter()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
                await _refusal()(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "none")
            self._metrics.http_request(scope["method"], path, status)
            logger.debug("%s %s %d in %.1f ms", scope["method"], path, status, 1000 * (time.perf_counter() - started))

    def _has_key(self, scope: Scope) -> bool:
        given = Request(scope).headers.get("authorization", "")
        kind, _, key = given.partition(" ")
        digest = _digest(key.strip())
        # every key is compared, so that the time does not tell which one was near
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return kind.lower() == "bearer" and any(matches)


def _refusal() -> Response:
    error = ApiError(
        401,
        "the API key is missing or wrong; send it as Authorization: Bearer KEY",
        code="invalid_api_key",
        kind=AUTHENTICATION,
    )
    return Response(error.content(), 401, {"WWW-Authenticate": "Bearer"}, media_type="application/json")
