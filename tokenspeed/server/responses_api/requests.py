"""The request body of responses. Every field here is honoured; RULES says what becomes of the others."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenspeed.server.fields import FieldRules
from tokenspeed.server.requests import BadWordList, Penalty, Probability, StopStrings, ThinkingTokens, TokenId

MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], MetadataValue], Meta(max_length=16)]

WITHOUT_EFFECT = {
    "user": "who asks makes no difference here",
    "safety_identifier": "who asks makes no difference here",
    "access_programs": "who asks makes no difference here",
    "service_tier": "there is one tier; use priority to go first",
    "prompt_cache_key": "prefixes are found by their content; use cache_salt to keep them apart",
    "prompt_cache_options": "prefixes stay cached while there is room",
    "prompt_cache_retention": "prefixes stay cached while there is room",
    "max_tool_calls": "counts calls of the server's own tools, of which there are none",
    "image": "this version does not take pictures",
}
"""Accepted because clients send them by habit and they cannot change an answer; each use is counted in a metric."""

REFUSED = {
    "background": "an answer is given to the request that asks for it",
    "background_options": "an answer is given to the request that asks for it",
    "context_management": "conversations are never edited in silence; send what the model is to read",
    "conversation": "conversations have no object of their own here; use previous_response_id",
    "moderation": "this server judges no content",
    "prompt": "this server keeps no prompt templates; send instructions and input",
    "top_logprobs": "log-probabilities are given by /v1/chat/completions",
}
"""Known fields that would change the answer, and which this server cannot honour."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "top_logprobs": (0,),
}
"""Values of refused fields that ask for what happens anyway."""

RULES = FieldRules(WITHOUT_EFFECT, REFUSED, HARMLESS)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Streams are not padded against traffic analysis, so only false is accepted."""

    include_obfuscation: bool | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is thought is given as it is: a ``summary`` of it is accepted without effect."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must look like; all but ``type`` go with type json_schema, where ``schema`` must be there. Every
    answer conforms, ``strict`` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message or of a tool's output."""

    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    refusal: str | None = None
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None
    prompt_cache_breakpoint: Any = None


class Item(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An item of the input; which fields it needs is a matter of its type (items.py)."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    phase: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    caller: Any = None


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    metadata: Metadata | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # not OpenAI's: as in chat completions
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: BadWordList | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: ThinkingTokens | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    return_timings: bool | None = None


SAME_NAMES = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "thinking_token_budget",
    "timeout",
    "parallel_tool_calls",
)
"""Fields that chat completions have under the same name."""
