"""HTTP connections with bounds: how many there are, how slowly one may ask, and how slowly one may read.

A reader that takes nothing holds back its own answer only (uvicorn waits for it); what is left is to notice that it
will never go on, and to cut it, which tells the route that its client has left.
"""

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenspeed.server.errors import UNAVAILABLE, ApiError
from tokenspeed.server.middleware import OPEN_PATHS

logger = logging.getLogger(__name__)

PROBE_CONNECTIONS = 64
"""Beyond the bound so many connections are let in all the same, and get answers from the probes only: whoever watches a
crowded server must not take it for a dead one."""

HEAD_S = 30.0
"""A connection has so long for the head of its first request, and for one that it has begun."""

RESERVED_FILES = 256
"""Open files that are not HTTP connections: sockets to the engine, logs, models, libraries."""

_CROWDED = ApiError(
    503,
    "the server has as many connections as it takes; try again in a second, on connections that are closed after use",
    code="too_many_connections",
    kind=UNAVAILABLE,
    headers={"Retry-After": "1", "Connection": "close"},
)


@dataclass(frozen=True, kw_only=True)
class ConnectionBounds:
    """What connections are held to.

    Attributes:
        most: connections at a time; 0 is no bound.
        slow_reader_s: a reader that takes no byte for so long, while many wait for it, is cut; 0 never.
        head_s: see HEAD_S.
        refused: hears of every request that is refused for the number of connections, with the code.
        cut: hears of every reader that is cut, with the reason.
    """

    most: int
    slow_reader_s: float
    head_s: float = HEAD_S
    refused: Callable[[str], None]
    cut: Callable[[str], None]


def bounded_protocol(bounds: ConnectionBounds) -> type[H11Protocol]:
    """Returns the protocol class that a uvicorn.Config takes as ``http``."""
    return type("BoundedProtocol", (BoundedProtocol,), {"bounds": bounds})


def connections_within(most: int) -> int:
    """Returns ``most``, or what this process's bound on open files leaves where that is less; says so in the log."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = max(soft - RESERVED_FILES, 1)
    if soft == resource.RLIM_INFINITY or 0 < most <= possible:
        return most
    if most:
        logger.warning("%d connections at most: this process may open %d files (ulimit -n)", possible, soft)
    return possible


class BoundedProtocol(H11Protocol):
    """One connection. ``bounds`` is set by ``bounded_protocol``."""

    bounds: ConnectionBounds
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.bounds.most
        if most and len(self.connections) > most + PROBE_CONNECTIONS:
            self.bounds.refused("too_many_connections")
            transport.write(_raw(_CROWDED))
            transport.close()
            return
        if most and len(self.connections) > most:
            self.app = _ProbesOnly(self.app, self.bounds.refused)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._reader_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self._reader_timer is None and self.transport.get_write_buffer_size():
            self._watch_reader()  # closed, but for an answer that nobody fetches

    def _watch_head(self) -> None:
        """The head of a request must be whole in time; uvicorn itself closes one that has asked and is idle."""
        if self.conn.their_state is not h11.IDLE:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.bounds.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()

    def _watch_reader(self) -> None:
        if self.bounds.slow_reader_s:
            self._unread = self.transport.get_write_buffer_size()
            self._reader_timer = self.loop.call_later(self.bounds.slow_reader_s, self._reader_is_late)

    def _reader_is_late(self) -> None:
        self._reader_timer = None
        unread = self.transport.get_write_buffer_size()
        if unread < self._unread:
            self._watch_reader()  # slow, but it reads
            return
        logger.info("cut a reader that took nothing for %g s; %d bytes were waiting", self.bounds.slow_reader_s, unread)
        self.bounds.cut("stalled")
        self.transport.abort()


class _ProbesOnly:
    """What a connection beyond the bound gets."""

    def __init__(self, app: ASGIApp, refused: Callable[[str], None]) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        self._refused("too_many_connections")
        answer = Response(_CROWDED.content(), _CROWDED.status, _CROWDED.headers, media_type="application/json")
        await answer(scope, receive, send)


def _raw(error: ApiError) -> bytes:
    """The whole answer as bytes, for a connection that is not read from."""
    content = error.content()
    headers = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    head = f"HTTP/1.1 {error.status} Service Unavailable\r\ncontent-type: application/json\r\n"
    return f"{head}{headers}content-length: {len(content)}\r\n\r\n".encode() + content
