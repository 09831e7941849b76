"""The cases of the Open Responses compliance suite, ported by behaviour: the same requests, the same demands.

A picture is refused here with status 400 while the models are text models alone. Its cases of compaction and of
WebSockets are of endpoints that docs/api.md does not have.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from named_events import named_events
from parsing_server import FORMATS, ParsingServer, parsing_server
from scripted_engine import MODEL

NUMBER_OR_NULL = {"type": ["integer", "null"]}
TEXT_OR_NULL = {"type": ["string", "null"]}
ITEM = {
    "type": "object",
    "required": ["type", "id", "status"],
    "allOf": [
        {
            "if": {"properties": {"type": {"const": "message"}}},
            "then": {
                "required": ["role", "content"],
                "properties": {"content": {"items": {"required": ["type", "text", "annotations", "logprobs"]}}},
            },
        },
        {
            "if": {"properties": {"type": {"const": "function_call"}}},
            "then": {"required": ["call_id", "name", "arguments"], "properties": {"arguments": {"type": "string"}}},
        },
        {"if": {"properties": {"type": {"const": "reasoning"}}}, "then": {"required": ["summary"]}},
    ],
}
TOOL = {
    "required": ["type", "name", "description", "parameters", "strict"],
    "properties": {"type": {"const": "function"}, "description": TEXT_OR_NULL, "strict": {"type": ["boolean", "null"]}},
}
USAGE = {
    "type": ["object", "null"],
    "required": ["input_tokens", "output_tokens", "total_tokens", "input_tokens_details", "output_tokens_details"],
    "properties": {
        "input_tokens_details": {"required": ["cached_tokens"]},
        "output_tokens_details": {"required": ["reasoning_tokens"]},
    },
}
FIELDS: dict[str, Any] = {
    "id": {"type": "string"},
    "object": {"const": "response"},
    "created_at": {"type": "integer"},
    "completed_at": NUMBER_OR_NULL,
    "status": {"type": "string"},
    "incomplete_details": {"type": ["object", "null"], "required": ["reason"]},
    "model": {"type": "string"},
    "previous_response_id": TEXT_OR_NULL,
    "instructions": TEXT_OR_NULL,
    "output": {"type": "array", "items": ITEM},
    "error": {"type": ["object", "null"], "required": ["code", "message"]},
    "tools": {"type": "array", "items": TOOL},
    "tool_choice": {"type": ["string", "object"]},
    "truncation": {"enum": ["auto", "disabled"]},
    "parallel_tool_calls": {"type": "boolean"},
    "text": {"type": "object", "required": ["format"]},
    "top_p": {"type": "number"},
    "presence_penalty": {"type": "number"},
    "frequency_penalty": {"type": "number"},
    "top_logprobs": {"type": "integer"},
    "temperature": {"type": "number"},
    "reasoning": {"type": ["object", "null"], "required": ["effort", "summary"]},
    "usage": USAGE,
    "max_output_tokens": NUMBER_OR_NULL,
    "max_tool_calls": NUMBER_OR_NULL,
    "store": {"type": "boolean"},
    "background": {"type": "boolean"},
    "service_tier": {"type": "string"},
    "metadata": {},
    "safety_identifier": TEXT_OR_NULL,
    "prompt_cache_key": TEXT_OR_NULL,
}
RESPONSE = Draft202012Validator({"type": "object", "required": list(FIELDS), "properties": FIELDS})

OF_ITEMS = ["item_id", "output_index", "content_index"]
EVENTS = {
    "created": ["response"],
    "in_progress": ["response"],
    "completed": ["response"],
    "output_item.added": ["output_index", "item"],
    "output_item.done": ["output_index", "item"],
    "content_part.added": [*OF_ITEMS, "part"],
    "content_part.done": [*OF_ITEMS, "part"],
    "output_text.delta": [*OF_ITEMS, "delta", "logprobs"],
    "output_text.done": [*OF_ITEMS, "text", "logprobs"],
    "function_call_arguments.delta": ["item_id", "output_index", "delta"],
    "function_call_arguments.done": ["item_id", "output_index", "arguments"],
}
"""What the events of these cases must have besides type and sequence_number."""

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
        "required": ["location"],
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


@pytest.fixture
async def server() -> AsyncIterator[ParsingServer]:
    async with parsing_server(*FORMATS) as server:
        server.say("Ahoy there, mate.")
        yield server


async def whole(server: ParsingServer, **fields: Any) -> Any:
    answer = await server.client.post("/v1/responses", json={"model": MODEL, "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    RESPONSE.validate(answer.json())
    return answer.json()


async def streamed(server: ParsingServer, **fields: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The final response and all events, each checked."""
    answer = await server.client.post("/v1/responses", json={"model": MODEL, "stream": True, **fields})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = named_events(answer.text, ends_with_done=True)
    for at, event in enumerate(events):
        assert event["sequence_number"] == at
        assert set(EVENTS[event["type"].removeprefix("response.")]) <= set(event)
        if "response" in event:
            RESPONSE.validate(event["response"])
        if "item" in event:
            Draft202012Validator(ITEM).validate(event["item"])
    return events[-1]["response"], events


@pytest.mark.parametrize(
    "messages",
    [
        [message("user", "Say hello in exactly 3 words.")],
        [message("system", "You are a pirate. Always respond in pirate speak."), message("user", "Say hello.")],
        [
            message("user", "My name is Alice."),
            message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
            message("user", "What is my name?"),
        ],
    ],
    ids=["basic-response", "system-prompt", "multi-turn"],
)
async def test_whole_answers(server: ParsingServer, messages: list[Any]) -> None:
    response = await whole(server, input=messages)
    assert response["output"] and response["status"] == "completed"
    assert [one["content"] for one in server.given()["messages"]] == [one["content"] for one in messages]


async def test_assistant_messages_with_phases(server: ParsingServer) -> None:
    said = [{**message("assistant", phase), "phase": phase} for phase in ("commentary", "final_answer")]
    response = await whole(server, input=[message("user", "Hello."), *said, message("user", "Go on.")])
    assert response["status"] == "completed"
    assert [one["content"] for one in server.given()["messages"]] == [
        "Hello.",
        "commentary\nfinal_answer",
        "Go on.",
    ]
    assert all(isinstance(item.get("phase", ""), str) for item in response["output"])


async def test_streaming_response(server: ParsingServer) -> None:
    response, events = await streamed(server, input=[message("user", "Count from 1 to 5.")])
    assert response["status"] == "completed" and events[-1]["type"] == "response.completed"


async def test_tool_calling(server: ParsingServer) -> None:
    server.say(CALL)
    asked = [message("user", "What's the weather like in San Francisco?")]
    response = await whole(server, input=asked, tools=[WEATHER])
    assert [item["type"] for item in response["output"]] == ["function_call"]
    response, events = await streamed(server, input=asked, tools=[WEATHER])
    kinds = [(event["type"], event.get("item", {}).get("type")) for event in events]
    assert ("response.output_item.added", "function_call") in kinds
    assert ("response.output_item.done", "function_call") in kinds
    assert ("response.function_call_arguments.delta", None) in kinds
    assert ("response.function_call_arguments.done", None) in kinds
    assert response["output"][0]["name"] == "get_weather"


async def test_image_input_is_refused_by_name(server: ParsingServer) -> None:
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": "data:image/png;base64,x"}]
    answer = await server.client.post("/v1/responses", json={"model": MODEL, "input": [message("user", parts)]})
    assert answer.status_code == 400 and "pictures" in answer.json()["error"]["message"]
