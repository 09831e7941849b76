"""The request bodies of the API. Every field here is honoured; fields.py says what becomes of all others."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenspeed.frontend.request import MAX_CHOICES, MAX_LOGPROBS
from tokenspeed.messages import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS

Probability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Text = Annotated[str, Meta(min_length=1)]
StopStrings = Text | Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)]
BadWordList = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]], Meta(max_length=MAX_BAD_WORDS)
]
ThinkingTokens = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Choices = Annotated[list[Text], Meta(min_length=1, max_length=10_000)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``include_obfuscation`` asks for padding against traffic analysis; there is none, so only false is accepted."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer conforms to ``schema`` whether ``strict`` or not; name and description go nowhere else."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an answer must look like, in OpenAI's words; ``triggers`` and ``structures`` are an extension."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    triggers: list[Text] | None = None
    structures: list[dict[str, Any]] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The same in vLLM's words; one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and plain completions share. None is the server's default."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    bad_words: BadWordList | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: LogprobCount | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    return_timings: bool | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the last chunk of a stream carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; the ones that are not text are refused by name."""

    type: str
    text: str | None = None


class SentFunction(msgspec.Struct, kw_only=True):
    """``arguments`` is JSON text, as answers have it; an object is taken too."""

    name: str
    arguments: str | dict[str, Any] | None = None


class SentCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer, sent back."""

    function: SentFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. ``refusal``, ``annotations``, ``audio`` and ``function_call`` come back from clients that resend an
    answer; they must be empty. ``reasoning`` is another name of ``reasoning_content``."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    thinking_token_budget: ThinkingTokens | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: LogprobCount | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``; ``tools`` go with these."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None
