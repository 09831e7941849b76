"""What the servers' sockets are like: a small answer leaves at once, whoever waits for which acknowledgement."""

import asyncio
import socket

from tokenspeed.launch.listeners import bound


async def test_small_writes_are_not_held_back() -> None:
    """With Nagle's algorithm on, an answer in two writes waits 40 ms for the client's delayed acknowledgement."""
    seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            seen.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    listener = bound("127.0.0.1", 0, refused="", mend="")
    server = await asyncio.get_running_loop().create_server(Connection, sock=listener)
    async with server:
        with socket.create_connection(listener.getsockname(), timeout=10):
            assert await seen
