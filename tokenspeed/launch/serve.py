"""``tokenspeed serve``: the API process from its first line to its last."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from tokenspeed.launch.banner import PhaseLine, print_ready
from tokenspeed.launch.service import Service
from tokenspeed.recipes.resolved import ResolvedConfig

EXIT_OK = 0
EXIT_CUT = 1
EXIT_USAGE = 2


def serve(config: ResolvedConfig) -> int:
    """Serves until told to stop and returns the exit status.

    0: drained, every stream was finished. 1: streams were cut, or the engine failed for good. 2: it cannot start as
    configured; one line on standard error says what would mend it.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s api %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        listener = bind(config.api.host, config.api.port)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    with listener:
        port = listener.getsockname()[1]
        config = config.model_copy(update={"api": config.api.model_copy(update={"port": port})})
        return asyncio.run(_Serving(config, listener).run())


def bind(host: str, port: int) -> socket.socket:
    """Takes the port before anything is loaded. Raises OSError with the line that mends it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port (make run PORT={port + 1})"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: a signal drains before it closes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Serving:
    """One run of the server."""

    def __init__(self, config: ResolvedConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._failed = ""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        service = Service(self._config, on_give_up=self._gave_up)
        try:
            await service.open()
            return await self._serve(service)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        finally:
            await service.close()

    async def _serve(self, service: Service) -> int:
        # Imported while the engine process loads its own, heavier libraries.
        from tokenspeed.server.app import create_app

        app = create_app(service.llm)
        server = _Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
        )
        serving = asyncio.create_task(server.serve(sockets=[self._listener]), name="http")
        watching = asyncio.create_task(self._watch(service), name="phases")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        cut = await self._drain(service)
        server.should_exit = True
        server.force_exit = self._force.is_set()
        await serving
        if self._failed:
            print(f"error: {self._failed}", file=sys.stderr)
            return EXIT_USAGE
        return EXIT_CUT if cut or self._force.is_set() else EXIT_OK

    async def _drain(self, service: Service) -> int:
        """Lets the open streams finish, for the grace time or until a second signal; returns how many did not."""
        service.supervisor.retire()
        open_streams = service.llm.open_choices
        if open_streams:
            grace = f"at most {self._config.drain_s:.0f} s; again to force"
            print(f"finishing {_streams(open_streams)} ({grace})", flush=True)
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
                    print_ready(self._config, state.facts)
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


def _streams(count: int) -> str:
    return f"{count} stream" if count == 1 else f"{count} streams"
