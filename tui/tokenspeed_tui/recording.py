"""Recordings: one observation a line, as JSON. What was recorded is what came, so a later dashboard reads it too."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from tokenspeed_tui.observation import RECORDING_VERSION, Observation

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Observation)


class RecordingError(ValueError):
    """A recording that cannot be read; names file and line."""


class Recorder:
    """Appends observations to a file, each line at once. Opening and writing raise OSError."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, observation: Observation) -> None:
        """Appends one line."""
        self._file.write(_encoder.encode(observation) + b"\n")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


class ReplaySource:
    """A recording as a source of observations: one each time one is asked for, then it ends."""

    def __init__(self, observations: tuple[Observation, ...]) -> None:
        self._observations = observations

    async def observations(self) -> AsyncIterator[Observation]:
        """Yields what was recorded, in its order."""
        for observation in self._observations:
            yield observation

    def watch_configuration(self, wanted: bool) -> None:
        """Changes nothing: what was recorded is what there is."""

    def watch_request(self, request: str | None) -> None:
        """Changes nothing either."""


def read_recording(path: Path) -> tuple[Observation, ...]:
    """Reads a whole recording; raises RecordingError where it cannot be read, is empty or of another version."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordingError(f"the recording {path} cannot be read: {error.strerror}") from error
    observations = []
    for number, text in enumerate(lines, start=1):
        try:
            observation = _decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"line {number} of the recording {path} is no observation: {error}") from error
        if observation.version != RECORDING_VERSION:
            raise RecordingError(
                f"line {number} of the recording {path} is of version {observation.version}, "
                f"this dashboard reads version {RECORDING_VERSION}: replay it with the version that wrote it"
            )
        observations.append(observation)
    if not observations:
        raise RecordingError(f"the recording {path} is empty: record one with --record")
    return tuple(observations)
