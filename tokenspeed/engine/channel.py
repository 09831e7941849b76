"""The engine's end of the wire: two ZeroMQ sockets to the process that serves the API, which binds both."""

import zmq

from tokenspeed.messages import EngineInput, EngineMessage, decode_input, encode

LINGER_MS = 2000
"""How long a closing socket may go on sending: the last status must reach the frontend, a dead one must not hold us."""


class OutputChannel:
    """Sends alone: the end of a rank that hears of requests from rank 0. One thread uses it.

    No socket has a high-water mark: the loop never waits for a slow reader, and what piles up is bounded by the
    requests that are live.
    """

    def __init__(self, output_endpoint: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._output = self._connected(zmq.PUSH, output_endpoint)

    def _connected(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(endpoint)
        return socket

    def send(self, message: EngineMessage) -> None:
        """Queues a message; never waits."""
        self._output.send(encode(message))

    def close(self) -> None:
        """Sends what is queued (for at most LINGER_MS) and closes."""
        self._output.close()
        self._context.term()


class EngineChannel(OutputChannel):
    """Receives ``EngineInput`` and sends everything else."""

    def __init__(self, input_endpoint: str, output_endpoint: str) -> None:
        super().__init__(output_endpoint)
        self._input = self._connected(zmq.PULL, input_endpoint)

    def receive(self, timeout_ms: int) -> list[EngineInput]:
        """Returns every message that is there, waiting at most ``timeout_ms`` for the first. Raises WireError."""
        messages: list[EngineInput] = []
        if not self._input.poll(timeout_ms):
            return messages
        while True:
            try:
                data = self._input.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(decode_input(data))

    def close(self) -> None:
        self._input.close()
        super().close()
