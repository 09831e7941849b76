"""What /v1/responses answers with: the response, its items, and how they come of an answer's segments."""

from typing import Any, Literal

import msgspec

from tokenspeed.frontend.request import Usage
from tokenspeed.server.segments import Segment
from tokenspeed.server.timings import TimingsBody

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem
ContentPart = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class UsageBody(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "UsageBody":
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class FailureBody(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response; the fields from ``background`` on say back what was asked, or what holds where nothing was. The last
    is not OpenAI's."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    model: str
    output: list[OutputItem] = []
    error: FailureBody | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: UsageBody | None = None
    background: bool = False
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None = None
    reasoning: dict[str, str | None]
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def item_of(segment: Segment, mark: str, status: Status | None = None) -> OutputItem:
    """The item of a segment; ``mark`` keeps its id apart from those of other responses. While ``status`` is
    in_progress it is empty."""
    if status == "in_progress":
        return _item(segment, mark, status, None)
    return _item(segment, mark, status or ("completed" if segment.complete else "incomplete"), segment.text)


def _item(segment: Segment, mark: str, status: Status, text: str | None) -> OutputItem:
    if segment.kind == "call":
        return CallItem(
            id=item_id(segment, mark),
            status=status,
            call_id=segment.call_id,
            name=segment.name,
            arguments=text or "",
        )
    if segment.kind == "reasoning":
        thoughts = [] if text is None else [ReasoningText(text=text)]
        return ReasoningItem(id=item_id(segment, mark), status=status, content=thoughts)
    content = [] if text is None else [OutputText(text=text)]
    return MessageItem(id=item_id(segment, mark), status=status, content=content)


def item_id(segment: Segment, mark: str) -> str:
    prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[segment.kind]
    return f"{prefix}_{mark}{segment.index:02x}"


def part_of(segment: Segment, text: str) -> ContentPart:
    """The one part of reasoning or a message."""
    return ReasoningText(text=text) if segment.kind == "reasoning" else OutputText(text=text)
