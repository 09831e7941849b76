"""Anthropic's requests in the form of chat completions."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from tokenspeed.server.anthropic.requests import (
    Block,
    CountTokensRequest,
    InnerBlock,
    Message,
    MessagesRequest,
    OutputConfig,
    Tool,
    ToolChoice,
)
from tokenspeed.server.body import invalid_value
from tokenspeed.server.errors import ApiError
from tokenspeed.server.turns import Turns

_Block = TypeVar("_Block", bound=InnerBlock)

ERROR_PREFIX = "Error: "
"""Stands before the result of a tool that failed: templates have no place that would say so."""

_FIELDS = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
_NEEDED = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name", "input"),
           "tool_result": ("tool_use_id",)}  # fmt: skip
_PLACES = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
_REFUSED = {
    "image": "this version does not take pictures yet, whatever the model; send text",
    "document": "this server takes no files; send their text",
    "search_result": "send what was found as text",
    "redacted_thinking": "only who wrote it can read it; leave it out",
    "container_upload": "this server runs no code",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
NAMES = {
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""What fields of chat completions are called here."""

_THOUGHTS = ("enabled", "adaptive", "between_tools", "disabled")


def chat_fields(body: CountTokensRequest, ignored: list[str], *, switchable: bool, reasons: bool) -> dict[str, Any]:
    """Returns the fields of the chat completion that ``body`` asks for; None for what it leaves open.

    Args:
        body: the request.
        ignored: gets the names of inner fields that are accepted without effect.
        switchable: whether it is known how the model's template switches reasoning.
        reasons: whether the model reasons.

    Raises:
        ApiError: 400, naming what cannot be honoured.
    """
    translator = _Translator(ignored)
    fields = {
        "model": body.model,
        "messages": translator.messages(body),
        "tools": translator.tools(body.tools or []),
        "reasoning_effort": translator.effort(body, switchable=switchable, reasons=reasons),
        "continue_final_message": True if body.messages[-1].role == "assistant" else None,
        "thinking_token_budget": translator.budget(body, reasons=reasons),
        "response_format": _response_format(body.output_config),
        **_choice(body.tool_choice),
    }
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return fields


class _Translator:
    def __init__(self, ignored: list[str]) -> None:
        self._ignored = ignored
        self._turns = Turns()

    def messages(self, body: CountTokensRequest) -> list[dict[str, Any]]:
        if body.system:
            self._turns.say("system", self._text(body.system, "system"))
        for at, message in enumerate(body.messages):
            self._message(message, f"messages[{at}]")
        last = body.messages[-1]
        if last.role == "assistant" and any(
            block.type == "tool_use" for block in last.content if isinstance(block, Block)
        ):
            where = f"messages[{len(body.messages) - 1}].content"
            raise _wrong(where, "ends with a tool_use; the next message must bring its tool_result")
        return self._turns.messages

    def tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return [self._tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)] or None

    def effort(self, body: CountTokensRequest, *, switchable: bool, reasons: bool) -> str | None:
        """``reasoning_effort``, of what ``thinking`` and ``output_config`` say; None where neither says anything."""
        thinking, config = body.thinking, body.output_config
        effort = None if config is None else config.effort
        if effort is not None and effort not in _EFFORTS:
            raise _wrong("output_config.effort", f"is {effort!r}; it must be one of {', '.join(_EFFORTS)}")
        if not switchable and effort is not None:
            self._ignored.append("output_config.effort")
            effort = None
        if thinking is None:
            return effort
        if thinking.type not in _THOUGHTS:
            raise _wrong("thinking.type", f"is {thinking.type!r}; it must be one of {', '.join(_THOUGHTS)}")
        if thinking.display == "omitted":
            raise _unsupported("thinking.display", "what the model thinks is shown, never left out")
        if not switchable:
            if thinking.type == "disabled" and reasons:
                raise _unsupported(
                    "thinking.type",
                    "'disabled': nothing says how this model's reasoning is switched off. Start the server with "
                    "--thinking-switch NAME, or set formats.thinking_switch in the recipe",
                )
            self._ignored.append("thinking")
            return None
        return "none" if thinking.type == "disabled" else effort or "medium"

    def budget(self, body: CountTokensRequest, *, reasons: bool) -> int | None:
        """``thinking_token_budget``; None where none is given, or the model does not reason."""
        thinking = body.thinking
        if thinking is None or thinking.budget_tokens is None or thinking.type == "disabled":
            return None
        if not reasons:
            self._ignored.append("thinking.budget_tokens")
            return None
        return thinking.budget_tokens

    def _message(self, message: Message, where: str) -> None:
        if message.role not in _PLACES:
            raise _wrong(f"{where}.role", f"is {message.role!r}; it must be one of {', '.join(_PLACES)}")
        if message.role == "assistant":
            self._assistant(message.content, f"{where}.content")
            return
        if message.role == "system":
            self._turns.say("system", self._text(message.content, f"{where}.content"))
            return
        texts: list[str] = []
        for at, block in enumerate(_blocks(message.content)):
            inner = f"{where}.content[{at}]"
            self._check(block, "user", inner)
            if block.type == "tool_result":
                self._say_user(texts)
                self._turns.result(block.tool_use_id or "", self._result(block, inner))
            else:
                texts.append(block.text or "")
        self._say_user(texts)

    def _say_user(self, texts: list[str]) -> None:
        if texts:
            self._turns.say("user", "\n".join(texts))
            texts.clear()

    def _assistant(self, content: str | list[Block], where: str) -> None:
        for at, block in enumerate(_blocks(content)):
            self._check(block, "assistant", f"{where}[{at}]")
            if block.type == "thinking":
                self._turns.reasoning(block.thinking or "")
            elif block.type == "tool_use":
                arguments = msgspec.json.encode(block.input).decode()
                self._turns.call(block.id or "", block.name or "", arguments)
            else:
                self._turns.answer(block.text or "")

    def _result(self, block: Block, where: str) -> str:
        text = self._text(block.content or "", f"{where}.content")
        return ERROR_PREFIX + text if block.is_error else text

    def _text(self, content: str | Sequence[InnerBlock], where: str) -> str:
        """The text of content that may hold nothing else."""
        for at, block in enumerate(_blocks(content)):
            self._check(block, "system", f"{where}[{at}]")
        return "\n".join(block.text or "" for block in _blocks(content))

    def _check(self, block: InnerBlock, place: str, where: str) -> None:
        """Raises where the block, or a field of it, cannot stand in ``place``."""
        allowed = _FIELDS.get(block.type)
        if allowed is None:
            why = _REFUSED.get(block.type, f"a block is of type {', '.join(_FIELDS)}")
            raise _unsupported(f"{where}.type", f"{block.type!r}: {why}")
        if block.type not in _PLACES[place]:
            raise _wrong(f"{where}.type", f"is {block.type}; only {', '.join(_PLACES[place])} can stand here")
        for name in block.__struct_fields__:
            value = getattr(block, name)
            if name in _NEEDED[block.type] and value is None:
                inner = f"{where}.{name}"
                raise ApiError(400, f"{inner} is missing", code="missing_field", param=inner)
            if value and name not in ("type", "cache_control", *allowed):
                raise ApiError(
                    400,
                    f"{where}.{name} is not a field of a block of type {block.type}",
                    code="unknown_field",
                    param=f"{where}.{name}",
                )
            if value and name in ("cache_control", "citations", "caller", "toolset_name", "signature"):
                self._ignored.append(name)

    def _tool(self, given: dict[str, Any], where: str) -> dict[str, Any]:
        kind = given.get("type")
        if kind not in (None, "custom"):
            raise _unsupported(f"{where}.type", f"{kind!r}: this server has no tools of its own; declare yours")
        try:
            tool = msgspec.convert(given, Tool)
        except msgspec.ValidationError as error:
            raise invalid_value(str(error), where) from error
        if tool.input_schema is None:
            inner = f"{where}.input_schema"
            raise ApiError(400, f"{inner} is missing", code="missing_field", param=inner)
        for name in ("cache_control", "defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"):
            if getattr(tool, name):
                self._ignored.append("cache_control" if name == "cache_control" else f"tools.{name}")
        function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        if tool.strict:
            function["strict"] = True
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": config.format.schema}}


def _choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        if not choice.name:
            raise ApiError(400, "tool_choice.name is missing", code="missing_field", param="tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **parallel}
    if choice.type not in _TOOL_CHOICES:
        raise _wrong("tool_choice.type", f"is {choice.type!r}; it must be one of {', '.join(_TOOL_CHOICES)}, tool")
    return {"tool_choice": _TOOL_CHOICES[choice.type], **parallel}


def _blocks(content: str | Sequence[_Block]) -> Sequence[_Block]:
    return [cast(_Block, Block(type="text", text=content))] if isinstance(content, str) else content


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} {what}", code="invalid_value", param=where)


def _unsupported(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} is not supported: {why}", code="unsupported_field", param=where)
