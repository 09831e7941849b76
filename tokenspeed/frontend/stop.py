"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        stop: which.
        start, end: where it stands in the whole text, in characters.
    """

    stop: str
    start: int
    end: int


class StopStringFinder:
    """Lets through what cannot be part of a stop string, holds back what may become one.

    The result does not depend on how the text was cut into pieces: the stop string that is complete first wins, and of
    two that end at the same character the longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` must not hold an empty string."""
        self._stops = tuple(stops)
        self._held = ""
        self._released = 0

    @property
    def released(self) -> int:
        """How many characters were let through so far."""
        return self._released

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """Takes the next piece; returns the text let through and the match, if there is one.

        At a match the text before it has been let through in full; nothing may be pushed after it.
        """
        buffer = self._held + text
        match = self._first_match(buffer)
        cut = match.start - self._released if match else len(buffer) - self._possible_start(buffer)
        self._held = buffer[cut:]
        self._released += cut
        return buffer[:cut], match

    def finish(self) -> str:
        """Returns what was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        self._released += len(held)
        return held

    def _first_match(self, buffer: str) -> StopMatch | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None or candidate < best else best
        if best is None:
            return None
        end, start, stop = best
        return StopMatch(stop, self._released + start, self._released + end)

    def _possible_start(self, buffer: str) -> int:
        """The length of the longest end of ``buffer`` that begins one of the stop strings."""
        longest = 0
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while at >= 0 and len(buffer) - at > longest:
                if stop.startswith(buffer[at:]):
                    longest = len(buffer) - at
                    break
                at = buffer.find(stop[0], at + 1)
        return longest
