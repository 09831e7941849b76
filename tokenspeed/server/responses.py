"""The response bodies of the API, as msgspec structs: a chunk is encoded in about a microsecond."""

from typing import Literal

import msgspec

from tokenspeed.frontend.request import Usage
from tokenspeed.messages import FinishReason
from tokenspeed.server.timings import TimingsBody

MatchedStop = str | int | None
ChatFinishReason = FinishReason | Literal["tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """``completion_tokens_details`` is there where reasoning is told apart."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, usage: Usage) -> "UsageBody":
        return cls(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            PromptTokensDetails(usage.cached_tokens),
            msgspec.UNSET if usage.reasoning_tokens is None else CompletionTokensDetails(usage.reasoning_tokens),
        )


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class LegacyLogprobs(msgspec.Struct):
    """The shape of plain completions. ``token_logprobs`` and ``top_logprobs`` are null for a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]


class FunctionCall(msgspec.Struct):
    """``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    matched_stop: MatchedStop


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobList | msgspec.UnsetType = msgspec.UNSET
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class CallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    matched_stop: MatchedStop | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason
    matched_stop: MatchedStop
    prompt_logprobs: PromptLogprobList | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: MatchedStop | msgspec.UnsetType = msgspec.UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "tokenspeed"
    max_model_len: int
    recipe: str
    profile: str


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeResponse(msgspec.Struct):
    prompt: str
