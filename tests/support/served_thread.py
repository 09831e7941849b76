"""The real application over a scripted engine, on a real port, in a thread of its own: for clients that block."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from app_server import serving
from scripted_engine import Script, ScriptedEngine, Stack, say, snapshot

from tokenspeed.launch.connections import ConnectionBounds
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.server.admin import create_admin_app
from tokenspeed.server.app import create_app


class ServedThread:
    """Use as a context manager; ``url`` and the administration's ``admin_url`` are there inside.

    The engine answers every request with ``script``.
    """

    def __init__(
        self, config: ResolvedConfig | None = None, *, script: Script | None = None, most_connections: int = 2048
    ) -> None:
        self._config = config
        self._script = script or say("hello")
        self._most = most_connections
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="served", daemon=True)
        self.cut: list[str] = []
        self.url = ""
        self.admin_url = ""

    def __enter__(self) -> "ServedThread":
        self._thread.start()
        assert self._ready.wait(30) and self.url, "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def engine(self) -> ScriptedEngine:
        return self._stack.engine

    @property
    def open_choices(self) -> int:
        return self._stack.llm.open_choices

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Runs a coroutine in the server's own event loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(30)

    def all_ended(self) -> None:
        """Returns once no choice is open; fails where that takes longer than ten seconds."""

        async def heard() -> None:
            async with asyncio.timeout(10):
                while self._stack.llm.open_choices:
                    await asyncio.sleep(0.005)

        self.run(heard)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._stack = Stack(self._config)
        try:
            engine = await self._stack.new_engine()
            engine.script = self._script
            await engine.send_snapshot(snapshot())
            async with asyncio.timeout(10):
                while self._stack.llm.engine.snapshot is None:
                    await self._stack.llm.engine.changed(self._stack.llm.engine.version)
            bounds = ConnectionBounds(most=self._most, slow_reader_s=2.0, refused=lambda _: None, cut=self.cut.append)
            app = create_app(self._stack.llm)
            async with (
                serving(create_admin_app(app)) as self.admin_url,
                serving(app, bounds=bounds) as self.url,
            ):
                self._ready.set()
                await self._end.wait()
        finally:
            self._ready.set()
            await self._stack.close()
