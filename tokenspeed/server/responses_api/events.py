"""The events of a streamed response, in the order of OpenAI's Responses."""

import msgspec

from tokenspeed.frontend.generation import Generation
from tokenspeed.frontend.request import Delta
from tokenspeed.server.errors import ApiError
from tokenspeed.server.responses_api.answers import ContentPart, OutputItem, ResponseBody, item_id, item_of, part_of
from tokenspeed.server.responses_api.draft import Draft
from tokenspeed.server.segments import Closed, Grown, Opened, Segment, SegmentReader, Step
from tokenspeed.server.stream import ChunkWriter, tagged_event


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event: its tag is its type. ``sequence_number`` counts from 0."""

    sequence_number: int = 0


class ResponseCreated(_Event, tag="response.created"):
    response: ResponseBody


class ResponseInProgress(_Event, tag="response.in_progress"):
    response: ResponseBody


class ResponseCompleted(_Event, tag="response.completed"):
    response: ResponseBody


class ResponseIncomplete(_Event, tag="response.incomplete"):
    response: ResponseBody


class ResponseFailed(_Event, tag="response.failed"):
    response: ResponseBody


class ItemAdded(_Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(_Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(_Event):
    output_index: int
    item_id: str


class PartAdded(_OfItem, kw_only=True, tag="response.content_part.added"):
    content_index: int = 0
    part: ContentPart


class PartDone(_OfItem, kw_only=True, tag="response.content_part.done"):
    content_index: int = 0
    part: ContentPart


class TextDelta(_OfItem, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: list[str] = []


class TextDone(_OfItem, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: list[str] = []


class ReasoningDelta(_OfItem, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningDone(_OfItem, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class ArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


_LAST = {"completed": ResponseCompleted, "incomplete": ResponseIncomplete}


class ResponseWriter(ChunkWriter):
    """Writes one response as events; there is one choice."""

    def __init__(self, draft: Draft, generation: Generation) -> None:
        self._draft = draft
        self._generation = generation
        self._reader = SegmentReader(generation)
        self._next = 0
        self._encoder = msgspec.json.Encoder()

    def deltas(self, batch: list[Delta]) -> bytes:
        opening = self._written(self._opening())  # written before the end of the batch can change the response
        events: list[_Event] = []
        for delta in batch:
            for step in self._reader.take(delta):
                events += self._events_of(step)
            if delta.finish_reason is not None:
                self._draft.end(self._reader, delta.finish_reason, self._generation)
        return opening + self._written(events)

    def end(self) -> bytes:
        response = self._draft.body
        if response.status not in _LAST:
            return b""
        return self._written([_LAST[response.status](response=response)])

    def failed(self, error: ApiError) -> bytes:
        opening = self._written(self._opening())
        self._draft.fail(self._reader, error)
        return opening + self._written([ResponseFailed(response=self._draft.body)])

    def _opening(self) -> list[_Event]:
        if self._next:
            return []
        response = self._draft.body
        return [ResponseCreated(response=response), ResponseInProgress(response=response)]

    def _written(self, events: list[_Event]) -> bytes:
        written = []
        for event in events:
            event.sequence_number = self._next
            self._next += 1
            written.append(tagged_event(event, self._encoder))
        return b"".join(written)

    def _events_of(self, step: Step) -> list[_Event]:
        segment, mark = step.segment, self._draft.mark
        at, name = segment.index, item_id(segment, mark)
        match step:
            case Opened(_):
                added: list[_Event] = [ItemAdded(output_index=at, item=item_of(segment, mark, "in_progress"))]
                if segment.kind != "call":
                    added.append(PartAdded(output_index=at, item_id=name, part=part_of(segment, "")))
                return added
            case Grown(_, text):
                kind = {"text": TextDelta, "reasoning": ReasoningDelta, "call": ArgumentsDelta}[segment.kind]
                return [kind(output_index=at, item_id=name, delta=text)]
            case Closed(_):
                done = ItemDone(output_index=at, item=item_of(segment, mark))
                return [*_closing(segment, name), done]


def _closing(segment: Segment, name: str) -> list[_Event]:
    at, text = segment.index, segment.text
    if segment.kind == "call":
        return [ArgumentsDone(output_index=at, item_id=name, name=segment.name, arguments=text)]
    kind = TextDone if segment.kind == "text" else ReasoningDone
    return [
        kind(output_index=at, item_id=name, text=text),
        PartDone(output_index=at, item_id=name, part=part_of(segment, text)),
    ]
