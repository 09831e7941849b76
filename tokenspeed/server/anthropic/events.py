"""The events of a streamed message, in Anthropic's order."""

import msgspec

from tokenspeed.frontend.generation import Generation
from tokenspeed.frontend.request import Delta
from tokenspeed.server.anthropic.answers import (
    ContentBlock,
    MessageBody,
    StopReason,
    UsageBody,
    opened_block,
    signature_of,
    stop_of,
)
from tokenspeed.server.error_shapes import anthropic_content
from tokenspeed.server.errors import ApiError
from tokenspeed.server.segments import Closed, Grown, Opened, Segment, SegmentReader, Step
from tokenspeed.server.stream import ChunkWriter, named_event, tagged_event
from tokenspeed.server.timings import TimingsBody, timings_of


class _Tagged(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event, or a delta within one: its tag is its type."""


class MessageStart(_Tagged, tag="message_start"):
    message: MessageBody


class Ping(_Tagged, tag="ping"):
    pass


class BlockStart(_Tagged, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(_Tagged, tag="text_delta"):
    text: str


class ThinkingDelta(_Tagged, tag="thinking_delta"):
    thinking: str


class SignatureDelta(_Tagged, tag="signature_delta"):
    signature: str


class InputDelta(_Tagged, tag="input_json_delta"):
    partial_json: str


class BlockDelta(_Tagged, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(_Tagged, tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(_Tagged, tag="message_delta"):
    delta: MessageEnd
    usage: UsageBody
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class MessageStop(_Tagged, tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageWriter(ChunkWriter):
    """Writes one message as events; there is one choice."""

    def __init__(self, generation: Generation, *, name: str, model: str, return_timings: bool | None = None) -> None:
        self._generation = generation
        self._name = name
        self._model = model
        self._return_timings = return_timings
        self._reader = SegmentReader(generation)
        self._begun = False
        self._end: MessageEnd | None = None
        self._encoder = msgspec.json.Encoder()

    @property
    def done(self) -> bytes:
        return b""

    def deltas(self, batch: list[Delta]) -> bytes:
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events += [MessageStart(message=self._opening()), Ping()]
        for delta in batch:
            for step in self._reader.take(delta):
                events += _events_of(step)
            if delta.finish_reason is not None:
                reason, sequence = stop_of(delta.finish_reason, delta.matched_stop, called=self._reader.called)
                self._end = MessageEnd(stop_reason=reason, stop_sequence=sequence)
        return self._written(events)

    def end(self) -> bytes:
        if self._end is None:
            return b""
        usage = UsageBody.of(self._generation.usage)
        timings = timings_of(self._generation, self._return_timings)
        last = MessageDelta(delta=self._end, usage=usage, timings=timings)
        return self._written([last, MessageStop()])

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", anthropic_content(error))

    def _opening(self) -> MessageBody:
        usage = UsageBody.of(self._generation.usage, output_tokens=0)
        return MessageBody(id=self._name, model=self._model, content=[], usage=usage)

    def _written(self, events: list[Event]) -> bytes:
        return b"".join([tagged_event(event, self._encoder) for event in events])


def _events_of(step: Step) -> list[Event]:
    match step:
        case Opened(segment):
            return [BlockStart(index=segment.index, content_block=opened_block(segment))]
        case Grown(segment, text):
            return [BlockDelta(index=segment.index, delta=_delta(segment, text))]
        case Closed(segment):
            end: list[Event] = [BlockStop(index=segment.index)]
            if segment.kind == "reasoning":
                signature = SignatureDelta(signature=signature_of(segment.text))
                return [BlockDelta(index=segment.index, delta=signature), *end]
            return end


def _delta(segment: Segment, text: str) -> TextDelta | ThinkingDelta | InputDelta:
    if segment.kind == "reasoning":
        return ThinkingDelta(thinking=text)
    if segment.kind == "text":
        return TextDelta(text=text)
    return InputDelta(partial_json=text)
