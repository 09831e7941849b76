"""The items of a conversation: checked, in the form that is kept and listed, and put together to chat messages."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenspeed.server.body import invalid_value
from tokenspeed.server.errors import ApiError
from tokenspeed.server.responses_api.requests import Item, Part
from tokenspeed.server.turns import Turns

_ROLES = ("user", "system", "developer", "assistant")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_PARTS = {
    "input_image": "this version does not take pictures yet, whatever the model; send text",
    "input_file": "this server takes no files; send their text",
    "input_audio": "this server reads and writes text only",
    "refusal": "a refusal cannot be told apart from an answer",
}
_TEXTS = ("input_text", "output_text", "text")


def read_items(given: str | Sequence[dict[str, Any]], ignored: list[str]) -> list[dict[str, Any]]:
    """Returns the items of a request's ``input`` in the form that is kept: typed, with ids, content as parts.

    Adds to ``ignored`` the names of inner fields that are accepted without effect. Raises ApiError (400) naming what
    cannot be honoured.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read(item, f"input[{at}]", ignored) for at, item in enumerate(given)]


def _read(given: dict[str, Any], where: str, ignored: list[str]) -> dict[str, Any]:
    kind = given.get("type") or "message"
    if kind not in _PREFIXES:
        why = (
            "send the item itself, or use previous_response_id"
            if kind == "item_reference"
            else f"this server knows {', '.join(_PREFIXES)}"
        )
        raise _unsupported(f"{where}.type", f"{kind!r}: {why}")
    try:
        item = msgspec.convert({name: value for name, value in given.items() if value is not None}, Item)
    except msgspec.ValidationError as error:
        raise invalid_value(str(error), where) from error
    for name in _NEEDED[kind]:
        if getattr(item, name) is None:
            raise ApiError(400, f"{where}.{name} is missing", code="missing_field", param=f"{where}.{name}")
    for name in ("phase", "encrypted_content", "caller"):
        if getattr(item, name):
            ignored.append(f"input.{name}")
    head = {"type": kind, "id": item.id or f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"}
    if kind == "message":
        return {**head, "status": "completed", **_message(item, where)}
    if kind == "reasoning":
        texts = [_text(part, f"{where}.content[{at}]", ("reasoning_text",)) for at, part in enumerate(_parts(item))]
        summary = [
            _text(part, f"{where}.summary[{at}]", ("summary_text",)) for at, part in enumerate(item.summary or ())
        ]
        return {
            **head,
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in texts],
        }
    if kind == "function_call":
        call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return {**head, "status": "completed", **call}
    output = item.output if isinstance(item.output, str) else _joined(item.output or [], f"{where}.output", _TEXTS)
    return {**head, "status": "completed", "call_id": item.call_id, "output": output}


def _message(item: Item, where: str) -> dict[str, Any]:
    if item.role not in _ROLES:
        param = f"{where}.role"
        text = f"{param} is {item.role!r}; it must be one of {', '.join(_ROLES)}"
        raise ApiError(400, text, code="invalid_value", param=param)
    kind = "output_text" if item.role == "assistant" else "input_text"
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if item.role == "assistant" else {}
    parts = [_text(part, f"{where}.content[{at}]", _TEXTS) for at, part in enumerate(_parts(item))]
    return {"role": item.role, "content": [{"type": kind, "text": text, **more} for text in parts]}


def _parts(item: Item) -> list[Part]:
    if isinstance(item.content, str):
        return [Part(type="input_text" if item.type == "message" else "reasoning_text", text=item.content)]
    return item.content or []


def _joined(parts: Sequence[Part], where: str, kinds: tuple[str, ...]) -> str:
    return "\n".join(_text(part, f"{where}[{at}]", kinds) for at, part in enumerate(parts))


def _text(part: Part, where: str, kinds: tuple[str, ...]) -> str:
    if part.type not in kinds:
        raise _unsupported(f"{where}.type", f"{part.type!r}: {_PARTS.get(part.type, f'a part is {kinds[0]} here')}")
    if part.text is None:
        raise ApiError(400, f"{where}.text is missing", code="missing_field", param=f"{where}.text")
    return part.text


def chat_messages(instructions: str | None, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the conversation that kept items make, as chat messages."""
    turns = Turns()
    if instructions:
        turns.say("system", instructions)
    for item in items:
        match item["type"]:
            case "message":
                text = "\n".join(part["text"] for part in item["content"])
                if item["role"] == "assistant":
                    turns.answer(text)
                else:
                    turns.say(item["role"], text)
            case "reasoning":
                texts = [part["text"] for part in (item["content"] or item["summary"])]
                if texts:
                    turns.reasoning("\n".join(texts))
            case "function_call":
                turns.call(item["call_id"], item["name"], item["arguments"])
            case "function_call_output":
                turns.result(item["call_id"], item["output"])
    return turns.messages


def _unsupported(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} is not supported: {why}", code="unsupported_field", param=where)
