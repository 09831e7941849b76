"""Bytes to messages and back. A message of another version is refused by name, never guessed at."""

from typing import TypeVar

import msgspec

from tokenspeed.messages.input import EngineInput
from tokenspeed.messages.inspect import Inspected
from tokenspeed.messages.order import OrderDone
from tokenspeed.messages.output import EngineOutput, EngineSnapshot, EngineStatus

PROTOCOL_VERSION = 3

EngineMessage = EngineOutput | EngineStatus | EngineSnapshot | OrderDone | Inspected
"""Whatever an engine says."""

_Message = TypeVar("_Message", EngineInput, EngineMessage)

_encoder = msgspec.msgpack.Encoder()
_input_decoder = msgspec.msgpack.Decoder(EngineInput)
_output_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


class WireError(ValueError):
    """A message that cannot be read: damaged, or of another protocol version."""


def encode(message: EngineInput | EngineMessage) -> bytes:
    """Returns the message as msgpack."""
    return _encoder.encode(message)


def decode_input(data: bytes) -> EngineInput:
    """Reads a message to the engine; raises WireError where it cannot be read."""
    try:
        message = _input_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"a message to the engine cannot be read: {error}") from error
    return _checked(message)


def decode_output(data: bytes) -> EngineMessage:
    """Reads a message from the engine; raises WireError where it cannot be read."""
    try:
        message = _output_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"a message from the engine cannot be read: {error}") from error
    return _checked(message)


def _checked(message: _Message) -> _Message:
    if message.version != PROTOCOL_VERSION:
        raise WireError(
            f"the other process speaks protocol version {message.version}, this one {PROTOCOL_VERSION}: "
            "both must come from the same installation"
        )
    return message
