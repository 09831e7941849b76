"""The real application on a real port, inside the test's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI

from tokenspeed.launch.connections import ConnectionBounds, bounded_protocol


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI, port: int = 0, *, bounds: ConnectionBounds | None = None, send_buffer: int = 0
) -> AsyncIterator[str]:
    """Serves ``app`` on ``port`` (0: a free one) of this machine and yields its URL; the port is free afterwards.

    ``bounds`` are those of its connections; ``send_buffer`` is what the kernel holds back for a slow reader, in bytes.
    """
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # whoever connects before the server runs waits
        protocol = bounded_protocol(bounds) if bounds is not None else "auto"
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_config=None, access_log=False, lifespan="off"))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        serving = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving
