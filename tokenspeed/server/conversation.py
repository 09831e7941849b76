"""The messages of a chat request, checked and in the plain form that templates read."""

from typing import Any

from tokenspeed.server.errors import ApiError
from tokenspeed.server.requests import ContentPart, Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles and what the template sees; templates know "system", of which "developer" is the newer name."""

_UNSUPPORTED = {
    "tool_calls": "tool calls are not supported by this version",
    "tool_call_id": "tool calls are not supported by this version",
    "function_call": "tool calls are not supported by this version",
    "audio": "this server reads and writes text only",
    "refusal": "a refusal cannot be told apart from an answer",
    "annotations": "annotations cannot be given to the model",
    "reasoning": "reasoning cannot be given back to the model by this version",
    "reasoning_content": "reasoning cannot be given back to the model by this version",
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
    if message.role in ("tool", "function"):
        raise _unsupported(f"{where}.role", f"{message.role!r}: {_UNSUPPORTED['tool_calls']}")
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
    if message.content is None:
        raise ApiError(400, f"{where}.content is missing", code="missing_field", param=f"{where}.content")
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": _text(message.content, f"{where}.content")}
    if message.name is not None:
        plain["name"] = message.name
    return plain


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


def _unsupported(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} is not supported: {why}", code="unsupported_field", param=where)
