"""Requests for responses in the form of chat completions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenspeed.server.body import invalid_value
from tokenspeed.server.errors import ApiError
from tokenspeed.server.responses_api.items import chat_messages
from tokenspeed.server.responses_api.requests import SAME_NAMES, FunctionTool, ResponsesRequest, TextConfig

_INCLUDED = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
"""What clients ask to see, and there is nothing of; reasoning is given openly."""

NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""What fields of chat completions are called here."""

_OF_A_SCHEMA = ("schema", "name", "description", "strict")


def chat_fields(body: ResponsesRequest, items: Sequence[dict[str, Any]], ignored: list[str]) -> dict[str, Any]:
    """Returns the fields of the chat completion that ``body`` asks for; None for what it leaves open.

    Args:
        body: the request.
        items: the whole conversation, as kept.
        ignored: gets the names of inner fields that are accepted without effect.

    Raises:
        ApiError: 400, naming what cannot be honoured.
    """
    _check_values(body, ignored)
    tools = read_tools(body.tools or [])
    choice, tools = _choice(body.tool_choice, tools)
    return {
        "model": body.model,
        "messages": chat_messages(body.instructions, items),
        "max_tokens": body.max_output_tokens,
        "tools": [_nested(tool) for tool in tools] or None,
        "tool_choice": choice,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _response_format(body.text),
        **{name: getattr(body, name) for name in SAME_NAMES},
    }


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    """``response_format`` as chat completions have it; raises ApiError (400)."""
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):
        raise _unsupported("text.verbosity", "the model has no such setting; say it in the instructions")
    form = text.format
    if form is None:
        return None
    given = {name: value for name in _OF_A_SCHEMA if (value := getattr(form, name)) is not None}
    if form.type == "json_schema":
        if form.schema is None:
            where = "text.format.schema"
            raise ApiError(400, f"{where} is missing", code="missing_field", param=where)
        return {"type": form.type, "json_schema": given}
    if given:
        where = f"text.format.{next(iter(given))}"
        raise ApiError(400, f"{where} goes with type json_schema", code="invalid_value", param=where)
    return {"type": form.type}


def read_tools(tools: Sequence[dict[str, Any]]) -> list[FunctionTool]:
    """Returns the declared tools, which must be functions."""
    result = []
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if tool.get("type") != "function":
            raise _unsupported(f"{where}.type", f"{tool.get('type')!r}: this server knows function tools only")
        try:
            result.append(msgspec.convert(tool, FunctionTool))
        except msgspec.ValidationError as error:
            raise invalid_value(str(error), where) from error
    return result


def _check_values(body: ResponsesRequest, ignored: list[str]) -> None:
    for at, name in enumerate(body.include or ()):
        if name not in _INCLUDED:
            why = "log-probabilities are given by /v1/chat/completions" if "logprobs" in name else "it is not known"
            raise _unsupported(f"include[{at}]", f"{name!r}: {why}")
        ignored.append("include")
    if body.truncation not in (None, "disabled"):
        raise _unsupported("truncation", f"{body.truncation!r}: a conversation is never cut in silence")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise _unsupported("stream_options.include_obfuscation", "streams are not padded")
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        ignored.append("reasoning.summary")


def _choice(choice: Any, tools: list[FunctionTool]) -> tuple[Any, list[FunctionTool]]:
    """``tool_choice`` as chat completions have it, and the tools that it leaves."""
    if not isinstance(choice, dict):
        return choice, tools
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, tools
    if choice.get("type") != "allowed_tools":
        raise _unsupported(
            "tool_choice", f"{choice.get('type')!r}: it is auto, none, required, function, allowed_tools"
        )
    named = [tool.get("name") for tool in choice.get("tools") or () if isinstance(tool, dict)]
    unknown = [name for name in named if name not in {tool.name for tool in tools}]
    if unknown or not named:
        what = f"names {unknown[0]!r}, which is not among the tools" if unknown else "names no tool"
        raise ApiError(400, f"tool_choice.tools {what}", code="invalid_value", param="tool_choice.tools")
    return choice.get("mode") or "auto", [tool for tool in tools if tool.name in named]


def _nested(tool: FunctionTool) -> dict[str, Any]:
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _unsupported(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} is not supported: {why}", code="unsupported_field", param=where)
