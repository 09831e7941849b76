"""Server-sent events: one class sends a generation, another the engine's state; both notice a client that leaves."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.frontend.errors import FrontendError, ReaderTooSlow
from tokenspeed.frontend.generation import Generation
from tokenspeed.frontend.request import Delta
from tokenspeed.server.body import ClientGone
from tokenspeed.server.context import ServerContext
from tokenspeed.server.errors import ApiError, from_frontend

DONE = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers of server-sent events pass over it, proxies see that the connection lives."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """Returns one server-sent event; ``data`` must be one line, as JSON without indentation is."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """Returns one server-sent event with a name, which some clients go by."""
    return b"event: " + name.encode() + b"\n" + event(data)


def tagged_event(tagged: msgspec.Struct, encoder: msgspec.json.Encoder) -> bytes:
    """Returns a struct as an event, named by its tag."""
    return named_event(str(tagged.__struct_config__.tag), encoder.encode(tagged))


class ChunkWriter(Protocol):
    """Turns deltas into events; one writer serves one stream."""

    def deltas(self, batch: list[Delta]) -> bytes:
        """Returns the events for a batch, b"" where there is nothing to show."""
        ...

    def end(self) -> bytes:
        """Returns what follows the last choice's end: the usage, if it was asked for."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Returns the event for what went wrong in mid-stream."""
        return event(error.content())

    @property
    def done(self) -> bytes:
        """What ends every stream, also a failed one."""
        return DONE


class DisconnectWatch:
    """Calls ``on_disconnect`` once when the client closes the connection, while the block runs."""

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "DisconnectWatch":
        self._task = asyncio.create_task(self._watch(), name="client watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect()


class GenerationStream(Response):
    """Sends a generation's chunks as they come, several in one write where several are there.

    The status line waits for the first chunk, so that what fails before it is answered with its own status; what fails
    later becomes an error event. A first chunk that takes longer than the keep-alive interval is not waited for: from
    then on comments keep the connection alive, here and wherever nothing comes for so long. The stream ends as
    the writer says, either way. A client that leaves cancels the generation, one that reads too slowly fails it.
    """

    def __init__(
        self,
        generation: Generation,
        writer: ChunkWriter,
        headers: dict[str, str],
        own_name: Callable[[ApiError], ApiError] = lambda error: error,
    ) -> None:
        """``own_name`` gives errors the names that fields have at the door."""
        super().__init__()
        self._start = [*_HEADERS, *((name.encode(), value.encode("latin-1")) for name, value in headers.items())]
        self._generation = generation
        self._writer = writer
        self._own_name = own_name
        self._begun = False
        self._keep_alive_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        context: ServerContext = scope["app"].state.context
        api = context.llm.config.api
        self._keep_alive_s = api.keep_alive_s
        generation.bound_mailbox(api.stream_buffer_bytes)
        try:
            async with DisconnectWatch(receive, generation.cancel):
                while batch := await self._next_batch(send):
                    await self._begin(send)
                    if data := self._writer.deltas(batch):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                if self._begun:
                    last = b"" if generation.cancelled else self._writer.end() + self._writer.done
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                elif generation.cancelled:
                    raise ClientGone  # before the first chunk: nobody reads an answer, and it is no fault of ours
        except FrontendError as error:
            if isinstance(error, ReaderTooSlow):
                context.metrics.stream_cut("buffer")
            told = self._own_name(from_frontend(error))
            if not self._begun:
                raise told from error  # answered like any other error
            last = self._writer.failed(told) + self._writer.done
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            generation.cancel()

    async def _next_batch(self, send: Send) -> list[Delta]:
        """What ``Generation.next_batch`` returns; meanwhile the client is told that all is well."""
        while not await self._generation.arrived(self._keep_alive_s):
            await self._begin(send)
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        return await self._generation.next_batch()

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self._start})


class EventSource(Response):
    """Sends what an iterator yields, until it ends or the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        try:
            async with DisconnectWatch(receive, leave):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                async with contextlib.aclosing(self._events) as events:
                    async for data in events:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
