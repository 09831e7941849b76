"""The sockets of the server's ports, taken before anything is loaded."""

import socket


def bound(host: str, port: int, *, refused: str, mend: str) -> socket.socket:
    """Takes the port; nobody can connect before somebody listens.

    Raises OSError with ``refused`` ("cannot listen"), where and why, and ``mend``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off where the protocol is named: else every kept connection waits 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{refused} on {host}:{port}: {error.strerror}; {mend}") from error
    return listener
