"""The wire between rank 0 and the other ranks of an engine: ZeroMQ sockets in a folder that all of them know.

Downwards goes whatever rank 0's scheduler is told and what it plans, as a journal has it, and the rows that begin: one
message for each plan. Upwards go the storage operations that ended, and at the end a good-bye.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq

from tokenspeed.device.handle import OperationOutcome, RowStart
from tokenspeed.messages import Pooling, SamplingParameters
from tokenspeed.telemetry.journal import Planned, Record

FAREWELL_S = 5.0
"""How long rank 0 waits at its end for the others to have taken part in all it told them."""


class Start(msgspec.Struct, frozen=True, array_like=True):
    """What a rank that does not sample must know of a RowStart.

    ``last_token`` is that of an output before, -1 where there is none. Of a prompt whose log-probabilities are asked
    for the length goes along, for the ranks compute the logits together; else it is 0.
    """

    handle: int
    row: int
    last_token: int
    prompt_tokens: int
    prompt_logprobs: int
    pooling: Pooling | None

    @classmethod
    def of(cls, start: RowStart) -> "Start":
        asked = start.sampling.prompt_logprobs
        return cls(
            handle=start.handle,
            row=start.row,
            last_token=int(start.output[-1]) if start.output.size else -1,
            prompt_tokens=start.prompt.size if asked >= 0 else 0,
            prompt_logprobs=asked,
            pooling=start.pooling,
        )

    def row_start(self) -> RowStart:
        """As the device side takes it."""
        output = [] if self.last_token < 0 else [self.last_token]
        return RowStart(
            handle=self.handle,
            row=self.row,
            sampling=SamplingParameters(prompt_logprobs=self.prompt_logprobs),
            prompt=np.zeros(self.prompt_tokens, np.int32),
            output=np.array(output, np.int32),
            pooling=self.pooling,
        )


class Told(msgspec.Struct, frozen=True, tag=0):
    """The records since the last message; ``starts`` where the plan that is the last of them is to be executed."""

    records: list[Record]
    starts: list[Start] | None = None


class Stop(msgspec.Struct, frozen=True, tag=1):
    """The engine ends; everything told before is still to be done."""


class Ended(msgspec.Struct, frozen=True, tag=0):
    """Storage operations that ended on a rank: id, and uint8 for each block where not all succeeded."""

    operations: list[tuple[int, bytes | None]]


class GoodBye(msgspec.Struct, frozen=True, tag=1):
    """A rank has done all it was told."""


_encode = msgspec.msgpack.Encoder().encode
_down: msgspec.msgpack.Decoder[Told | Stop] = msgspec.msgpack.Decoder(Told | Stop)
_up: msgspec.msgpack.Decoder[Ended | GoodBye] = msgspec.msgpack.Decoder(Ended | GoodBye)


def _address(meeting: str, name: str) -> str:
    return f"ipc://{Path(meeting) / name}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket


class LeadingLink:
    """Rank 0's end. It takes the place of a journal's writer: what is appended goes to the other ranks.

    Nothing here waits but ``stop``; what piles up is bounded by the requests that are live.

    Attributes:
        is_broken: set where the ranks are known to be out of step: nobody says good-bye then.
    """

    def __init__(self, meeting: str, world: int) -> None:
        self.world = world
        self.is_broken = False
        self._context = zmq.Context(io_threads=1)
        # The other end binds: a socket that connects takes what is sent whether or not somebody is there to read it.
        self._down = [_socket(self._context, zmq.PUSH) for _ in range(1, world)]
        for rank, socket in enumerate(self._down, 1):
            socket.connect(_address(meeting, f"rank{rank}"))
        self._up = _socket(self._context, zmq.PULL)
        self._up.bind(_address(meeting, "reports"))
        self._records: list[Record] = []
        self._gone = 0

    def append(self, record: Record) -> None:
        """Adds a record; a plan that was not executed goes out before whatever follows it."""
        if self._records and isinstance(self._records[-1], Planned):
            self._send(None)
        self._records.append(record)

    def flush(self) -> None:
        """Records go out with the plan they lead to."""

    def execute(self, starts: Sequence[RowStart]) -> None:
        """Has every rank execute the last plan."""
        self._send([Start.of(start) for start in starts])

    def _send(self, starts: list[Start] | None) -> None:
        self._tell(Told(self._records, starts))
        self._records = []

    def _tell(self, message: Told | Stop) -> None:
        data = _encode(message)
        for socket in self._down:
            socket.send(data)

    def ended(self) -> list[OperationOutcome]:
        """The storage operations that ended on other ranks since this was last asked: one for each of those ranks."""
        outcomes: list[OperationOutcome] = []
        while self._up.poll(0):
            outcomes += self._received()
        return outcomes

    def _received(self) -> list[OperationOutcome]:
        message = _up.decode(self._up.recv())
        if isinstance(message, GoodBye):
            self._gone += 1
            return []
        return [
            OperationOutcome(op_id=op_id, succeeded=None if flags is None else np.frombuffer(flags, np.uint8))
            for op_id, flags in message.operations
        ]

    def stop(self) -> None:
        """Ends the other ranks once they have done what they were told; waits FAREWELL_S at most. Call it once."""
        self._tell(Stop())
        deadline = time.monotonic() + (0.0 if self.is_broken else FAREWELL_S)
        while self._gone < self.world - 1 and self._up.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            self._received()
        self.close()

    def close(self) -> None:
        """Closes and says nothing."""
        self._context.destroy(linger=0)


class FollowingLink:
    """The end of any other rank."""

    def __init__(self, meeting: str, rank: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._down, self._up = _socket(self._context, zmq.PULL), _socket(self._context, zmq.PUSH)
        self._down.bind(_address(meeting, f"rank{rank}"))
        self._up.connect(_address(meeting, "reports"))

    def receive(self, timeout_ms: int) -> Told | Stop | None:
        """The next message; None where none comes in time."""
        return _down.decode(self._down.recv()) if self._down.poll(timeout_ms) else None

    def report(self, outcomes: Sequence[OperationOutcome]) -> None:
        """Tells rank 0 of storage operations that ended here."""
        told = [(each.op_id, None if each.succeeded is None else each.succeeded.tobytes()) for each in outcomes]
        self._up.send(_encode(Ended(told)))

    def take_leave(self) -> None:
        """Tells rank 0 that everything was done."""
        self._up.send(_encode(GoodBye()))

    def close(self) -> None:
        """Closes once what was said has gone, FAREWELL_S at most."""
        self._context.destroy(linger=int(FAREWELL_S * 1000))
