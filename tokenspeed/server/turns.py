"""Conversations of the other doors in the form of chat completions, which all requests are worked on in."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tokenspeed.frontend.errors import FrontendError
from tokenspeed.server.body import invalid_value
from tokenspeed.server.errors import ApiError, from_frontend
from tokenspeed.server.fields import REFUSED
from tokenspeed.server.requests import ChatRequest


class Turns:
    """Puts the pieces of a conversation together to chat messages.

    What an assistant says in a row, its reasoning, text and calls, becomes one message as long as a message can hold it
    in this order.

    Attributes:
        messages: so far, as JSON.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """A message of its own, of any role but the assistant's."""
        self.messages.append({"role": role, "content": text})

    def result(self, call_id: str, text: str) -> None:
        """What a tool gave back."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def reasoning(self, text: str) -> None:
        """What the assistant thought."""
        message = self._assistant(without=("content", "tool_calls"))
        message["reasoning_content"] = _joined(message.get("reasoning_content"), text)

    def answer(self, text: str) -> None:
        """What the assistant said."""
        message = self._assistant(without=("tool_calls",))
        message["content"] = _joined(message.get("content"), text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool that the assistant called; ``arguments`` are JSON text."""
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _assistant(self, without: tuple[str, ...] = ()) -> dict[str, Any]:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in without):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _joined(before: str | None, text: str) -> str:
    return text if before is None else f"{before}\n{text}"


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """Returns ``fields``, those of a chat completion, as the request; None is as good as absent.

    Raises ApiError (400) naming what is wrong.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() - set(ChatRequest.__struct_fields__):
        raise ApiError(400, f"{name} is not supported: {REFUSED[name]}", code="unsupported_field", param=name)
    try:
        return msgspec.convert(given, ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid_value(str(error)) from error


@contextlib.contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Gives errors of the shared path the names that fields have at a door; ``names`` are by those of chat completions.

    Errors of the frontend leave it as ApiError.
    """
    try:
        yield
    except FrontendError as error:
        raise renamed(from_frontend(error), names) from error
    except ApiError as error:
        raise renamed(error, names) from error


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns the error with the name that the field at fault has at a door: the whole of it is looked up in ``names``,
    then what it begins with."""
    body = error.body.error
    param = body.param or ""
    head = param.partition(".")[0].partition("[")[0]
    # tools stand without "function" around them at the other doors; a place in the messages is not the same there
    name = param.replace(".function.", ".") if head == "tools" else names.get(param) or names.get(head, param)
    message = name + body.message.removeprefix(param) if param and body.message.startswith(param) else body.message
    return ApiError(error.status, message, code=body.code, param=name, kind=body.type, headers=error.headers)
