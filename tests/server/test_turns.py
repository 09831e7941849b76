"""How the pieces of a conversation become chat messages."""

import pytest

from tokenspeed.server.errors import ApiError
from tokenspeed.server.turns import Turns, chat_request


def call(name: str) -> dict[str, object]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_what_an_assistant_says_in_a_row_is_one_message() -> None:
    turns = Turns()
    turns.say("user", "a")
    turns.reasoning("b")
    turns.reasoning("c")
    turns.answer("d")
    turns.answer("e")
    turns.call("f", "f", "{}")
    turns.call("g", "g", "{}")
    turns.result("f", "h")
    turns.answer("i")
    assert turns.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "b\nc", "content": "d\ne", "tool_calls": [call("f"), call("g")]},
        {"role": "tool", "tool_call_id": "f", "content": "h"},
        {"role": "assistant", "content": "i"},
    ]


def test_what_a_message_cannot_hold_in_its_order_begins_another() -> None:
    turns = Turns()
    turns.answer("a")
    turns.reasoning("b")
    turns.call("c", "c", "{}")
    turns.answer("d")
    assert turns.messages == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "reasoning_content": "b", "tool_calls": [call("c")]},
        {"role": "assistant", "content": "d"},
    ]


def test_fields_that_chat_does_not_have_are_refused_by_name() -> None:
    message = {"role": "user", "content": "x"}
    request = chat_request({"model": "m", "messages": [message], "seed": None, "top_k": 3})
    assert (request.top_k, request.seed) == (3, None)
    with pytest.raises(ApiError, match=r"messages\[0\].role is missing"):
        chat_request({"model": "m", "messages": [{"content": "x"}]})
    with pytest.raises(ApiError, match="suffix is not supported"):
        chat_request({"model": "m", "messages": [message], "suffix": "x"})
