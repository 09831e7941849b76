"""A listening socket handed from a running server to the one that takes its place: no connection is refused meanwhile.

The running server answers on an abstract Unix socket that is named after its process. Whoever of the same user asks
gets the listening socket; from then on both hold it, and connections wait in its queue for whichever accepts.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_ANSWER_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MESSAGE = b"tokenspeed listener"


class HandoverError(RuntimeError):
    """The running server did not give its socket; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a server is to listen.

    Attributes:
        listener: the listening socket, taken before anything was fetched or loaded.
        retire: called once this server is ready and before it accepts, so that the server whose place it takes accepts
            no more; None where the place was free.
    """

    listener: socket.socket
    retire: Callable[[], None] | None = None


class Handover:
    """Offers ``listener`` to a successor. Lives in the event loop of the server.

    Attributes:
        given: whether a successor has it.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.given = False

    def open(self) -> None:
        """Begins to answer; a system without abstract sockets offers nothing."""
        with suppress(OSError):
            self._door.setblocking(False)
            self._door.bind(_door_name(os.getpid()))
            self._door.listen(1)
            asyncio.get_running_loop().add_reader(self._door, self._answer)

    def close(self) -> None:
        """Ends it."""
        asyncio.get_running_loop().remove_reader(self._door)
        self._door.close()

    def _answer(self) -> None:
        with suppress(OSError):
            caller, _ = self._door.accept()
            with caller:
                if _peer(caller)[1] == os.getuid():
                    socket.send_fds(caller, [_MESSAGE], [self._listener.fileno()])
                    self.given = True


def receive_listener(pid: int) -> socket.socket:
    """Asks the server process ``pid`` of this user for its listening socket. Raises HandoverError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(_ANSWER_S)
        try:
            door.connect(_door_name(pid))
            if _peer(door)[:2] != (pid, os.getuid()):
                raise HandoverError(f"pid {pid} is not the one that answers for it")
            message, descriptors, _, _ = socket.recv_fds(door, len(_MESSAGE), 1)
        except OSError as error:
            raise HandoverError(f"pid {pid} does not hand its socket over ({error})") from error
    if message != _MESSAGE or len(descriptors) != 1:
        raise HandoverError(f"pid {pid} does not hand its socket over")
    return socket.socket(fileno=descriptors[0])


def _door_name(pid: int) -> str:
    return f"\0tokenspeed-{pid}"


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
