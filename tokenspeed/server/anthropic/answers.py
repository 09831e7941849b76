"""What /v1/messages answers with: the message, its blocks, and how they come of an answer's segments."""

import base64
import hashlib
from typing import Any, Literal

import msgspec
import pydantic_core

from tokenspeed.frontend.request import Usage
from tokenspeed.messages import FinishReason
from tokenspeed.server.segments import Segment
from tokenspeed.server.timings import TimingsBody

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """``signature`` only says that the block is whole: clients that send it back need not fear a check."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class UsageBody(msgspec.Struct, kw_only=True):
    """``input_tokens`` are those that did not come from the prefix cache, as Anthropic counts."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage, output_tokens: int | None = None) -> "UsageBody":
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens if output_tokens is None else output_tokens,
        )


class MessageBody(msgspec.Struct, kw_only=True):
    """``timings`` is not Anthropic's."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: UsageBody
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


def block_of(segment: Segment) -> ContentBlock:
    """The block of a whole segment."""
    text = segment.text
    if segment.kind == "reasoning":
        return ThinkingBlock(thinking=text, signature=signature_of(text))
    if segment.kind == "text":
        return TextBlock(text=text)
    return ToolUseBlock(id=segment.call_id, name=segment.name, input=input_of(text))


def opened_block(segment: Segment) -> ContentBlock:
    """The block as it stands when a stream begins it."""
    if segment.kind == "reasoning":
        return ThinkingBlock(thinking="", signature="")
    if segment.kind == "text":
        return TextBlock(text="")
    return ToolUseBlock(id=segment.call_id, name=segment.name, input={})


def signature_of(thinking: str) -> str:
    """A digest of the text: the same for the same thought, streamed or not."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def input_of(arguments: str) -> dict[str, Any]:
    """The input of a call, as clients read it of a stream: what is whole of arguments that were cut off.

    Arguments that are no JSON object stand under the name ``arguments``, as the model wrote them.
    """
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def stop_of(reason: FinishReason, matched: str | int | None, *, called: bool) -> tuple[StopReason, str | None]:
    """``stop_reason`` and ``stop_sequence`` for the end of a choice."""
    if reason == "length":
        return "max_tokens", None
    if isinstance(matched, str):
        return "stop_sequence", matched
    return ("tool_use" if called else "end_turn"), None
