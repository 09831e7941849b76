"""The frontend's end of the wire to the engine process."""

import asyncio
import logging
import shutil
import tempfile
from typing import Protocol

import zmq
import zmq.asyncio

from tokenspeed.messages import (
    PROTOCOL_VERSION,
    EngineInput,
    EngineOutput,
    EngineSnapshot,
    EngineStatus,
    Finish,
    Inspect,
    Inspected,
    Order,
    OrderDone,
    Submit,
    WireError,
    decode_output,
    encode,
)

_log = logging.getLogger(__name__)


class EngineListener(Protocol):
    """Who hears what the engine says. All calls come from the event loop's thread and must not block."""

    def on_output(self, output: EngineOutput) -> None: ...

    def on_status(self, status: EngineStatus) -> None: ...

    def on_snapshot(self, snapshot: EngineSnapshot) -> None: ...

    def on_order_done(self, answer: OrderDone) -> None: ...

    def on_inspected(self, answer: Inspected) -> None: ...

    def on_engine_lost(self, cause: str) -> None: ...

    def on_engine_given_up(self, cause: str) -> None: ...


class EngineConnection(Protocol):
    """How AsyncLLM speaks to an engine. Nothing here waits; what is sent in one turn of the event loop travels as one
    message."""

    def listen(self, listener: EngineListener) -> None:
        """Names the one that hears the engine from now on."""
        ...

    def submit(self, request: Submit) -> None: ...

    def finish(self, finish: Finish) -> None: ...

    def abort(self, handle: int) -> None: ...

    def order(self, order: Order) -> None: ...

    def inspect(self, inspect: Inspect) -> None: ...

    def watch(self, seconds: float) -> None:
        """Somebody looks for so long: snapshots are to be complete."""
        ...

    def drain(self) -> None:
        """Asks the engine to refuse new requests and to exit after the last one ended."""
        ...


class Outbox:
    """Gathers what is to be said to the engine until it is taken."""

    def __init__(self) -> None:
        self._submits: list[Submit] = []
        self._finishes: list[Finish] = []
        self._aborts: list[int] = []
        self._orders: list[Order] = []
        self._inspects: list[Inspect] = []
        self._watch_s = 0.0
        self._drain = False

    def submit(self, request: Submit) -> None:
        self._submits.append(request)

    def finish(self, finish: Finish) -> None:
        self._finishes.append(finish)

    def abort(self, handle: int) -> None:
        self._aborts.append(handle)

    def order(self, order: Order) -> None:
        self._orders.append(order)

    def inspect(self, inspect: Inspect) -> None:
        self._inspects.append(inspect)

    def watch(self, seconds: float) -> None:
        self._watch_s = max(self._watch_s, seconds)

    def drain(self) -> None:
        self._drain = True

    def take(self) -> EngineInput | None:
        """Returns everything gathered as one message, and forgets it; None where there is nothing."""
        work = self._submits or self._finishes or self._aborts or self._orders or self._drain
        if not (work or self._inspects or self._watch_s):
            return None
        message = EngineInput(
            version=PROTOCOL_VERSION,
            submits=self._submits,
            finishes=self._finishes,
            aborts=self._aborts,
            orders=self._orders,
            inspects=self._inspects,
            watch_s=self._watch_s,
            drain=self._drain,
        )
        self._submits, self._finishes, self._aborts, self._orders, self._drain = [], [], [], [], False
        self._inspects, self._watch_s = [], 0.0
        return message


class ZmqEngineConnection:
    """EngineConnection over two ZeroMQ sockets, PUSH towards the engine and PULL from it.

    The frontend binds both, the engine connects. Each engine process gets endpoints of its own (``rebind``), so that
    nothing a dead engine left behind is ever read as the new one's. They lie in a folder that only this user can enter.
    Must be used from one event loop.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.mkdtemp(prefix="tokenspeed-")
        self._generation = 0
        self._listener: EngineListener | None = None
        self._outbox = Outbox()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[zmq.asyncio.Socket] = []

    def listen(self, listener: EngineListener) -> None:
        self._listener = listener

    def submit(self, request: Submit) -> None:
        self._outbox.submit(request)
        self._wake.set()

    def finish(self, finish: Finish) -> None:
        self._outbox.finish(finish)
        self._wake.set()

    def abort(self, handle: int) -> None:
        self._outbox.abort(handle)
        self._wake.set()

    def order(self, order: Order) -> None:
        self._outbox.order(order)
        self._wake.set()

    def inspect(self, inspect: Inspect) -> None:
        self._outbox.inspect(inspect)
        self._wake.set()

    def watch(self, seconds: float) -> None:
        self._outbox.watch(seconds)
        self._wake.set()

    def drain(self) -> None:
        self._outbox.drain()
        self._wake.set()

    def rebind(self) -> tuple[str, str]:
        """Leaves the old endpoints, if any, and binds fresh ones; what was not sent yet is dropped.

        Returns:
            (input, output) as the engine sees them: it connects a PULL socket to the first and a PUSH to the second.

        Raises:
            OSError: an endpoint cannot be bound; the message names it and what would mend it.
        """
        self._leave()
        self._generation += 1
        into, out = (f"ipc://{self._folder}/{self._generation}.{end}" for end in ("in", "out"))
        to_engine, from_engine = self._bind(zmq.PUSH, into), self._bind(zmq.PULL, out)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._send_loop(to_engine), name="to the engine"),
            loop.create_task(self._receive_loop(from_engine), name="from the engine"),
        ]
        return into, out

    def engine_lost(self, cause: str) -> None:
        """To be called by whoever watches the engine process, once it is gone: every open request ends with an error,
        new ones are refused until the next engine is ready."""
        if self._listener is not None:
            self._listener.on_engine_lost(cause)

    def engine_given_up(self, cause: str) -> None:
        """To be called after ``engine_lost`` when the engine will not be started again."""
        if self._listener is not None:
            self._listener.on_engine_given_up(cause)

    def close(self) -> None:
        """Leaves the endpoints, frees the sockets and removes the folder they were in."""
        self._leave()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _bind(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # the number of open requests is bounded elsewhere; a full queue here would lose an abort
        self._sockets.append(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(
                f"the engine's endpoint {endpoint} cannot be bound: {error.strerror}. "
                "Is TMPDIR a short path to a folder that can be written?"
            ) from error
        return socket

    def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        for socket in self._sockets:
            socket.close(linger=0)
        self._tasks, self._sockets, self._outbox = [], [], Outbox()

    async def _send_loop(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            message = self._outbox.take()
            if message is not None:
                await socket.send(encode(message))

    async def _receive_loop(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            if self._listener is None:
                continue
            try:
                self._dispatch(self._listener, data)
            except WireError as error:
                _log.error("%s", error)
                self.engine_lost(str(error))
            except Exception:
                _log.exception("a message from the engine could not be handled")

    @staticmethod
    def _dispatch(listener: EngineListener, data: bytes) -> None:
        message = decode_output(data)
        if isinstance(message, EngineOutput):
            listener.on_output(message)
        elif isinstance(message, EngineStatus):
            listener.on_status(message)
        elif isinstance(message, OrderDone):
            listener.on_order_done(message)
        elif isinstance(message, Inspected):
            listener.on_inspected(message)
        else:
            listener.on_snapshot(message)
