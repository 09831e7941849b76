"""The request bodies of Anthropic's door. Every field here is honoured; RULES says what becomes of the others."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenspeed.server.fields import FieldRules
from tokenspeed.server.requests import Probability

StopSequences = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)]

_ONE_SERVER = "this server runs the model itself; there is nobody to pass the request on to"

WITHOUT_EFFECT = {
    "metadata": "nothing is stored that it could be attached to",
    "service_tier": "there is one tier",
    "cache_control": "prefixes are found by their content",
    "inference_geo": "the model runs where the server is",
    "user_profile_id": "who asks makes no difference here",
    "workspace_id": "who asks makes no difference here",
    "diagnostics": "asks for notes on an answer, not for another one",
    "speed": "there is one speed",
}
"""Accepted because clients send them by habit and they cannot change an answer; each use is counted in a metric."""

REFUSED = {
    "container": "this server runs no code",
    "mcp_servers": "this server calls no tools itself",
    "context_management": "conversations are never edited in silence; send what the model is to read",
    "compaction": "conversations are never edited in silence; send what the model is to read",
    "output_format": "it is the old name; send output_config.format",
    "fallbacks": _ONE_SERVER,
    "fallback_credit_token": _ONE_SERVER,
    "billing_policy": "this server bills nobody",
    "thread": "nothing is stored; send the whole conversation",
}
"""Known fields that would change the answer, and which this server cannot honour."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "fallbacks": ([],),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}
"""Values of refused fields that ask for what happens anyway."""

RULES = FieldRules(WITHOUT_EFFECT, REFUSED, HARMLESS)


class InnerBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A block of a tool's result; which fields it may have is a matter of its type (translate.py)."""

    type: str
    text: str | None = None
    citations: list[Any] | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    cache_control: Any = None


class Block(InnerBlock, kw_only=True):
    """A block of a message."""

    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: Any = None
    toolset_name: str | None = None
    tool_use_id: str | None = None
    content: str | list[InnerBlock] | None = None
    is_error: bool | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client's own, which alone is known here."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text of the answer must look like."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What decides on the prompt."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    stream: bool | None = None
    stop_sequences: StopSequences | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    return_timings: bool | None = None  # not Anthropic's: as in chat completions
