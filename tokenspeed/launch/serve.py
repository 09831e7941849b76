"""``tokenspeed serve``: the API process from its first line to its last."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from tokenspeed.launch.admin_port import AdminPort, QuietServer
from tokenspeed.launch.banner import PhaseLine, print_ready
from tokenspeed.launch.connections import ConnectionBounds, bounded_protocol, connections_within
from tokenspeed.launch.early_engine import EarlyEngine
from tokenspeed.launch.facts import redactor_of
from tokenspeed.launch.handover import Handover, Place
from tokenspeed.launch.listeners import bound
from tokenspeed.launch.service import Service
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.telemetry.logs import Logs, LogSettings, server_logs, traceback_on_fatal_signal

EXIT_OK = 0
EXIT_CUT = 1
EXIT_USAGE = 2

CONSOLE_FILE = "TOKENSPEED_LOG"
"""Names the file that the output of a server in the background goes to; it is rotated from here."""


_LAST_ACCEPTED_S = 0.25
"""A connection that was accepted just before the successor took over sends its request within this time."""


def serve(config: ResolvedConfig, place: Place | None = None, early: EarlyEngine | None = None) -> int:
    """Serves until told to stop and returns the exit status; in a place that is taken already where that is given, and
    by an engine process that was started already.

    0: drained, every stream was finished. 1: streams were cut, or the engine failed for good. 2: it cannot start as
    configured; one line on standard error says what would mend it.
    """
    traceback_on_fatal_signal()
    settings = LogSettings(**config.log.model_dump())
    with contextlib.ExitStack() as stack:
        try:
            logs = stack.enter_context(server_logs(settings, redactor_of(config), os.environ.get(CONSOLE_FILE, "")))
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        return _serve(config, place, logs, early)


def _serve(config: ResolvedConfig, place: Place | None, logs: Logs, early: EarlyEngine | None) -> int:
    try:
        place = place or Place(bind(config.api.host, config.api.port))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    with place.listener:
        port = place.listener.getsockname()[1]
        config = config.model_copy(update={"api": config.api.model_copy(update={"port": port})})
        try:
            serving = _Serving(config, place, logs, early)
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        return asyncio.run(serving.run())


def bind(host: str, port: int) -> socket.socket:
    """Takes the API's port, and has the system keep who connects. Raises OSError with the line that mends it."""
    mend = f"choose another with --port (make run PORT={port + 1})"
    listener = bound(host, port, refused="cannot listen", mend=mend)
    listener.listen(2048)
    return listener


class _Serving:
    """One run of the server."""

    def __init__(self, config: ResolvedConfig, place: Place, logs: Logs, early: EarlyEngine | None) -> None:
        self._config = config
        self._early = early
        self._listener = place.listener
        self._retire_other = place.retire
        self._logs = logs
        self._handover = Handover(place.listener)
        self._admin = AdminPort(config.api, follows=place.retire is not None)
        self._accepting = asyncio.Event()
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._failed = ""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        service = Service(self._config, on_give_up=self._gave_up, server_log=self._logs.tail.text, early=self._early)
        self._handover.open()
        try:
            await service.open()
            return await self._serve(service)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        finally:
            self._handover.close()
            await self._admin.close()
            await service.close()

    async def _serve(self, service: Service) -> int:
        # Imported while the engine process loads its own, heavier libraries.
        from tokenspeed.server.admin import create_admin_app
        from tokenspeed.server.app import create_app

        app = create_app(service.llm)
        server = QuietServer(
            uvicorn.Config(
                app,
                http=bounded_protocol(self._connection_bounds(app)),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
            )
        )
        watching = asyncio.create_task(self._watch(service), name="phases")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        if self._retire_other is not None and not await self._take_over(service, stopping, self._retire_other):
            watching.cancel()
            return self._ended(cut=0)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]), name="http")
        self._admin.serve(create_admin_app(app))
        self._accepting.set()
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        service.supervisor.retire()
        if open_streams := service.llm.open_choices:
            grace = f"at most {self._config.drain_s:.0f} s; again to force"
            print(f"finishing {_streams(open_streams)} ({grace})", flush=True)
        if self._handover.given:
            await self._admin.close()
            await _leave_to_successor(server)
        cut = await self._drain(service)
        server.should_exit = True
        server.force_exit = self._force.is_set()
        await serving
        await asyncio.to_thread(app.state.context.close)
        return self._ended(cut)

    def _connection_bounds(self, app: FastAPI) -> ConnectionBounds:
        metrics = app.state.context.metrics
        return ConnectionBounds(
            most=connections_within(self._config.api.max_connections),
            slow_reader_s=self._config.api.slow_reader_s,
            refused=metrics.refused,
            cut=metrics.stream_cut,
        )

    async def _take_over(
        self, service: Service, stopping: asyncio.Task[bool], retire_other: Callable[[], None]
    ) -> bool:
        """Waits until the engine is ready, then retires the other server; False where this one was stopped first."""
        ready = asyncio.create_task(service.llm.engine.wait_ready(), name="ready")
        await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            return False
        if (error := ready.exception()) is not None:
            self._failed = self._failed or str(error)
            return False
        retire_other()
        return True

    def _ended(self, cut: int) -> int:
        if self._failed:
            print(f"error: {self._failed}", file=sys.stderr)
            return EXIT_USAGE
        return EXIT_CUT if cut or self._force.is_set() else EXIT_OK

    async def _drain(self, service: Service) -> int:
        """Lets the open streams finish, for the grace time or until a second signal; returns how many did not."""
        draining = asyncio.create_task(service.llm.drain(self._config.drain_s))
        forced = asyncio.create_task(self._force.wait())
        await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not draining.done():
            draining.cancel()
            return service.llm.open_choices
        cut = draining.result()
        if cut:
            print(f"cut at the end of the grace time: {_streams(cut)}", file=sys.stderr)
        return cut

    async def _watch(self, service: Service) -> None:
        """Shows the phases of each start, and the way in when the engine is ready."""
        state = service.llm.engine
        line = PhaseLine()
        shown: tuple[object, ...] = ()
        while True:
            status = state.status
            now = (state.phase, *((status.done, status.total, status.detail) if status else ()))
            if now != shown:
                if state.ready:
                    await self._accepting.wait()
                    print_ready(self._config, state.facts, self._admin.address)
                else:
                    line.show(state.phase, status)
            shown = now
            await state.changed()

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    def _gave_up(self, cause: str, ever_ready: bool) -> None:
        """An engine that never was ready ends the server; one that was leaves it up to say so (503 with the cause)."""
        if not ever_ready:
            self._failed = cause
            self._stop.set()


async def _leave_to_successor(server: uvicorn.Server) -> None:
    """Accepts no more and closes idle connections, so that their next requests reach the successor."""
    for acceptor in server.servers:
        acceptor.close()
    await asyncio.sleep(_LAST_ACCEPTED_S)
    for connection in list(server.server_state.connections):
        connection.shutdown()


def _streams(count: int) -> str:
    return f"{count} stream" if count == 1 else f"{count} streams"
