"""Messages with calls in the shape that a template reads.

Templates disagree about what the arguments of a call are, and about an answer that has calls and no text.

Some write arguments with ``tojson`` or walk through them as an object (Qwen, GLM, MiniMax); others join them to a text,
because to them they are one (DeepSeek's own up to V3.1). Some leave out a content that is none (DeepSeek's); others
write the word None for it (GLM's, MiniMax's).
"""

import json
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, and where a template joins it to a text, the JSON of it."""

    def __add__(self, behind: object) -> str:
        return str(self) + behind if isinstance(behind, str) else NotImplemented

    def __radd__(self, before: object) -> str:
        return before + str(self) if isinstance(before, str) else NotImplemented

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


_PROBE: Messages = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": Arguments(a="b")}}
        ],
    },
]


def takes_no_content(render: Callable[[Messages], str]) -> bool:
    """Whether a template knows what to do with an answer whose content is none: it neither fails nor writes "None"."""
    try:
        without = render(_PROBE)
        with_empty = render([_PROBE[0], {**_PROBE[1], "content": ""}])
    except Exception:  # a template can fail in any way that code can
        return False
    return without.count("None") <= with_empty.count("None")


def template_messages(messages: Messages, *, takes_none: bool) -> Messages:
    """Returns the messages as a template reads them; ``takes_none`` false makes a content that is none an empty one."""
    return [_readable(message, takes_none) for message in messages]


def _readable(message: dict[str, Any], takes_none: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if message.get("content", "") is None and not takes_none:
        changes["content"] = ""
    if message.get("tool_calls"):
        changes["tool_calls"] = [_readable_call(call) for call in message["tool_calls"]]
    return {**message, **changes} if changes else message


def _readable_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": Arguments(function["arguments"])}}
