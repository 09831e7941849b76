"""The messages of a chat request, checked and in the plain form that templates read."""

from typing import Any

import msgspec

from tokenspeed.server.errors import ApiError
from tokenspeed.server.requests import ContentPart, Message, SentCall

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Accepted roles and what the template sees; templates know "system", of which "developer" is the newer name."""

_UNSUPPORTED = {
    "function_call": "it is the old name; send tool_calls",
    "audio": "this server reads and writes text only",
    "refusal": "a refusal cannot be told apart from an answer",
    "annotations": "annotations cannot be given to the model",
}

_PICTURES = "this version does not take pictures yet, whatever the model; send text"
_OTHER_PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image", "video_url", "input_video", "video"), _PICTURES),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "this server reads and writes text only"),
    "file": "this server takes no files; send their text",
}


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns the messages as dictionaries of text; raises ApiError (400) naming what cannot be honoured."""
    return [_plain(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if message.role == "function":
        raise _unsupported(f"{where}.role", "'function' is the old name; send the role tool")
    if message.role not in ROLES:
        raise ApiError(
            400,
            f"{where}.role is {message.role!r}; it must be one of {', '.join(ROLES)}",
            code="invalid_value",
            param=f"{where}.role",
        )
    for name, why in _UNSUPPORTED.items():
        if getattr(message, name):
            raise _unsupported(f"{where}.{name}", why)
    _check_place(message, where)
    said = message.reasoning_content or message.reasoning
    if message.content is None and not (message.tool_calls or said):
        raise _missing(f"{where}.content")
    content = None if message.content is None else _text(message.content, f"{where}.content")
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if said:
        plain["reasoning_content"] = said
        if not content:
            plain["thinking"] = said  # the name that gpt-oss's template knows, and refuses beside content
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _check_place(message: Message, where: str) -> None:
    """Calls and reasoning are an assistant's, and a tool's result says which call it answers."""
    for name in ("tool_calls", "reasoning", "reasoning_content"):
        if getattr(message, name) and message.role != "assistant":
            raise _wrong(f"{where}.{name}", f"stands in a message of the role {message.role}; it is an assistant's")
    if message.role == "tool" and not message.tool_call_id:
        raise _missing(f"{where}.tool_call_id")
    if message.role != "tool" and message.tool_call_id:
        raise _wrong(f"{where}.tool_call_id", f"stands in a message of the role {message.role}; it is a tool's")


def _call(call: SentCall, where: str) -> dict[str, Any]:
    """A call as templates read it: arguments are an object, or stay text where the model wrote no object."""
    if call.type not in (None, "function"):
        raise _unsupported(f"{where}.type", f"{call.type!r}: this server knows function tools only")
    arguments: Any = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            read = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            read = None
        arguments = read if isinstance(read, dict) else arguments
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        if part.type != "text":
            why = _OTHER_PARTS.get(part.type, "a part is of type text")
            raise _unsupported(f"{where}[{at}].type", f"{part.type!r}: {why}")
        if part.text is None:
            raise ApiError(400, f"{where}[{at}].text is missing", code="missing_field", param=f"{where}[{at}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _missing(where: str) -> ApiError:
    return ApiError(400, f"{where} is missing", code="missing_field", param=where)


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} {what}", code="invalid_value", param=where)


def _unsupported(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} is not supported: {why}", code="unsupported_field", param=where)
