"""The administration's port beside the API's: taken before anything is loaded, left when the server ends."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from tokenspeed.launch.listeners import bound
from tokenspeed.recipes.resolved import ApiSettings

logger = logging.getLogger(__name__)

TAKE_AGAIN_S = 0.5
"""Between two tries to take the port from the server that this one follows."""


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handling: a signal drains before it closes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminPort:
    """Serves the administration on ``api.admin_host`` and ``api.admin_port``; does nothing where there is no port.

    A server that takes another's place may find the port still held by that one: it then waits for it and serves
    without an administration until the other has ended.
    """

    def __init__(self, api: ApiSettings, *, follows: bool) -> None:
        """``follows``: another server may hold the port for a while. Raises OSError where it cannot be taken."""
        self._host = api.admin_host
        self._port = api.admin_port
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._server: QuietServer | None = None
        if self._port is not None and not follows:
            self._listener = _bound(self._host, self._port)

    @property
    def address(self) -> str:
        """Where it is, as a URL; "" without one."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve(self, app: FastAPI) -> None:
        """Begins to answer, in the running event loop."""
        if self._port is not None:
            self._task = asyncio.create_task(self._serve(app), name="administration")

    async def close(self) -> None:
        """Ends it and frees the port; open answers have a second."""
        if self._server is not None:
            self._server.should_exit = True
        elif self._task is not None:
            self._task.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, app: FastAPI) -> None:
        assert self._port is not None
        while self._listener is None:
            try:
                self._listener = _bound(self._host, self._port)
            except OSError as error:
                logger.info("the administration waits for its port: %s", error)
                await asyncio.sleep(TAKE_AGAIN_S)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = QuietServer(config)
        await self._server.serve(sockets=[self._listener])


def _bound(host: str, port: int) -> socket.socket:
    return bound(host, port, refused="the administration cannot listen", mend="choose another with --admin-port")
