"""An answer as a row of segments: a stretch of reasoning, a stretch of text, or one tool call.

Messages and responses both write their blocks and items from these, whole or in a stream, so both forms agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tokenspeed.frontend.generation import Generation
from tokenspeed.frontend.parsing.parts import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning
from tokenspeed.frontend.request import Delta

SegmentKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Segment:
    """One stretch of an answer.

    Attributes:
        index: its place in the answer, from 0.
        kind: what it is.
        call_id, name: of a call.
        complete: whether the answer went on behind it, or ended by itself.
        pieces: its text as it came.
    """

    index: int
    kind: SegmentKind
    call_id: str = ""
    name: str = ""
    complete: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of reasoning or answer; a call's arguments, which are JSON text wherever the model wrote any."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    segment: Segment


@dataclass(frozen=True, slots=True)
class Grown:
    segment: Segment
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    segment: Segment


Step = Opened | Grown | Closed


class SegmentReader:
    """Takes the deltas of one choice and says how its segments grow; at most one is open at a time.

    Attributes:
        segments: so far.
    """

    def __init__(self, generation: Generation) -> None:
        """``generation`` is what the choice belongs to: where nothing is told apart in it, all text is the answer."""
        self._parsed = generation.prompts[0].request.parsing is not None
        self.segments: list[Segment] = []
        self._open: Segment | None = None

    @property
    def called(self) -> bool:
        """Whether there is a tool call."""
        return any(segment.kind == "call" for segment in self.segments)

    def take(self, delta: Delta) -> list[Step]:
        """Takes what one delta adds to the choice; with its last one all segments end."""
        plain = [Content(delta.text)] if delta.text else []
        steps = self.push(delta.parts if self._parsed else plain)
        if delta.finish_reason is not None:
            steps += self.finish(complete=delta.finish_reason == "stop")
        return steps

    def push(self, parts: Iterable[Part]) -> list[Step]:
        """Takes the next parts, in their order."""
        steps: list[Step] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    self._grow(text, self._stretch("reasoning", steps), steps)
                case Content(text):
                    self._grow(text, self._stretch("text", steps), steps)
                case CallBegun(_, call_id, name):
                    self._begin("call", steps, call_id, name)
                case CallArguments(_, text):
                    self._grow(text, self._open, steps)
                case CallEnded(_):
                    self._close(steps, complete=True)
        return steps

    def finish(self, *, complete: bool) -> list[Step]:
        """The choice ended; ``complete`` says whether by itself or because it was cut off."""
        steps: list[Step] = []
        # a call without its end was cut off however the choice ended
        self._close(steps, complete=complete and (self._open is None or self._open.kind != "call"))
        return steps

    def _stretch(self, kind: SegmentKind, steps: list[Step]) -> Segment:
        if self._open is not None and self._open.kind == kind:
            return self._open
        return self._begin(kind, steps)

    def _begin(self, kind: SegmentKind, steps: list[Step], call_id: str = "", name: str = "") -> Segment:
        self._close(steps, complete=True)
        segment = Segment(len(self.segments), kind, call_id=call_id, name=name)
        self.segments.append(segment)
        self._open = segment
        steps.append(Opened(segment))
        return segment

    def _grow(self, text: str, segment: Segment | None, steps: list[Step]) -> None:
        assert segment is not None
        segment.pieces.append(text)
        steps.append(Grown(segment, text))

    def _close(self, steps: list[Step], *, complete: bool) -> None:
        if self._open is not None:
            self._open.complete = complete
            steps.append(Closed(self._open))
            self._open = None
