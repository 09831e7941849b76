"""Function calls and reasoning through /v1/responses, and the official client's view of every event."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from app_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from named_events import named_events
from openai.types import responses as typed
from parsed_answers import FAMILIES
from parsing_server import FORMATS, ParsingServer, parsing_server
from scripted_engine import MODEL, tokens

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tells it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        "strict": False,
    },
    {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": False},
]
ASKED: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": TOOLS}
TWO = FAMILIES["hermes"].two


@pytest.fixture
async def server() -> AsyncIterator[ParsingServer]:
    async with parsing_server(*FORMATS) as server:
        server.say(TWO)
        yield server


@pytest.fixture
async def official(server: ParsingServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(server.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(server: ParsingServer, **fields: Any) -> Any:
    answer = await server.client.post("/v1/responses", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return named_events(answer.text, ends_with_done=True) if fields.get("stream") else answer.json()


async def test_a_whole_response_with_calls(server: ParsingServer) -> None:
    response = await ask(server)
    reasoning, message, first, second = response["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I ask."}]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["type"], call["name"], call["arguments"]) for call in (first, second)] == [
        ("function_call", "weather", '{"city": "Köln", "days": 2}'),
        ("function_call", "time", "{}"),
    ]
    assert len({item["id"] for item in response["output"]}) == 4 and first["call_id"] != second["call_id"]
    assert {item["status"] for item in response["output"]} == {response["status"]} == {"completed"}
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < response["usage"]["output_tokens"]
    assert [tool["name"] for tool in response["tools"]] == ["weather", "time"]


async def test_the_events_of_a_stream_with_calls(server: ParsingServer) -> None:
    server.say(TWO, each=1000)
    events = await ask(server, stream=True)
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]

    def item(*inner: str) -> list[str]:
        return ["output_item.added", *inner, "output_item.done"]

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *item(*(kind.format("reasoning_text") for kind in text)),
        *item(*(kind.format("output_text") for kind in text)),
        *item(*call),
        *item(*call),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that deltas make; asserts that what is done says the same."""
    items: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == len(pieces)
            items.append(event["item"])
            pieces.append("")
        elif kind.endswith(".delta"):
            pieces[event["output_index"]] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == pieces[-1]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == pieces[-1]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
            inner = items[-1].get("content", [{}])[0].get("text", items[-1].get("arguments"))
            assert inner == pieces[-1]
    return items


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        left_out = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(item) for name, item in value.items() if name not in left_out}
    return value


@settings(max_examples=15, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    each=st.integers(1, 40),
    cut=st.integers(1, 300),
    stop=st.sampled_from([[], ["see"], ["days"]]),
    lead=st.text(max_size=5),
)
async def test_streams_say_the_same_as_whole_responses(
    family: str, each: int, cut: int, stop: list[str], lead: str
) -> None:
    one = FAMILIES[family]
    async with parsing_server(one.tools, one.reasoning, "") as server:
        server.say(lead + one.two, each=each)
        fields: dict[str, Any] = {"max_output_tokens": cut, "stop": stop}
        whole, events = await ask(server, **fields), await ask(server, **fields, stream=True)
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert without_ids(last["response"]) == without_ids(whole)
    assert joined(events) == last["response"]["output"]


async def test_an_answer_goes_back_to_the_template(server: ParsingServer) -> None:
    """The same conversation, whether its items are sent again or gone on from."""
    response = await ask(server)
    first, second = response["output"][2:]
    results = [
        {"type": "function_call_output", "call_id": first["call_id"], "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": second["call_id"],
            "output": [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "clock"}],
        },
        {"role": "user", "content": "Well?"},
    ]
    await ask(server, input=results, previous_response_id=response["id"])
    gone_on = server.given()
    await ask(server, input=[{"role": "user", "content": "Hi"}, *response["output"], *results])
    assert server.given() == gone_on
    assert [tool["function"]["name"] for tool in gone_on["tools"]] == ["weather", "time"]
    user, assistant, sunny, clock, well = gone_on["messages"]
    assert user == {"role": "user", "content": "Hi"} and well == {"role": "user", "content": "Well?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "I ask.")
    assert [call["id"] for call in assistant["tool_calls"]] == [first["call_id"], second["call_id"]]
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Köln", "days": 2}}
    assert sunny == {"role": "tool", "tool_call_id": first["call_id"], "content": "sunny"}
    assert clock == {"role": "tool", "tool_call_id": second["call_id"], "content": "no\nclock"}


async def test_reasoning_that_is_summed_up_goes_back_too(server: ParsingServer) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "short"}]}
    await ask(server, input=[{"role": "user", "content": "a"}, thought, {"role": "assistant", "content": "b"}])
    message = server.given()["messages"][1]
    assert (message["reasoning_content"], message["content"]) == ("short", "b")


async def test_choices_of_tools(server: ParsingServer) -> None:
    response = await ask(server, parallel_tool_calls=False)
    assert [item["name"] for item in response["output"] if item["type"] == "function_call"] == ["weather"]
    assert response["parallel_tool_calls"] is False
    response = await ask(server, tool_choice="none")
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    response = await ask(server, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in server.given()["tools"]] == ["time"]
    assert response["tool_choice"] == allowed


async def test_effort_reaches_the_template(server: ParsingServer) -> None:
    response = await ask(server, reasoning={"effort": "high"})
    assert (server.given()["thinking"], server.given()["effort"]) == (True, "high")
    assert response["reasoning"]["effort"] == "high"
    await ask(server, reasoning={"effort": "none"})
    assert server.given()["thinking"] is False


async def test_every_event_is_one_the_official_client_knows(
    server: ParsingServer, official: openai.AsyncOpenAI
) -> None:
    server.say(TWO, each=1000)
    kinds = [type(event) async for event in await official.responses.create(**ASKED, stream=True)]
    text = [typed.ResponseContentPartAddedEvent, None, None, typed.ResponseContentPartDoneEvent]
    call: list[Any] = [typed.ResponseFunctionCallArgumentsDeltaEvent, typed.ResponseFunctionCallArgumentsDoneEvent]

    def item(*inner: Any) -> list[Any]:
        return [typed.ResponseOutputItemAddedEvent, *inner, typed.ResponseOutputItemDoneEvent]

    assert kinds == [
        typed.ResponseCreatedEvent,
        typed.ResponseInProgressEvent,
        *item(text[0], typed.ResponseReasoningTextDeltaEvent, typed.ResponseReasoningTextDoneEvent, text[3]),
        *item(text[0], typed.ResponseTextDeltaEvent, typed.ResponseTextDoneEvent, text[3]),
        *item(*call),
        *item(*call),
        typed.ResponseCompletedEvent,
    ]


async def test_the_official_clients_tool_loop(server: ParsingServer, official: openai.AsyncOpenAI) -> None:
    async with official.responses.stream(**ASKED) as stream:
        seen = {event.type async for event in stream}
        response = await stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= seen
    assert response.output_text == "Let me see."
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [
        ("weather", '{"city": "Köln", "days": 2}'),
        ("time", "{}"),
    ]
    server.say("Sunny.")
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls
    ]
    answer = await official.responses.create(model=MODEL, input=results, tools=TOOLS, previous_response_id=response.id)
    assert answer.output_text == "Sunny." and answer.usage is not None
    assert [m["role"] for m in server.given()["messages"]] == ["user", "assistant", "tool", "tool"]
    assert (await official.responses.retrieve(answer.id)).model_dump() == answer.model_dump()
    listed = [item async for item in official.responses.input_items.list(answer.id, order="asc")]
    assert [item.type for item in listed] == ["function_call_output", "function_call_output"]
    await official.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="deleted"):
        await official.responses.retrieve(answer.id)


async def test_the_official_client_sees_a_failure(server: ParsingServer, official: openai.AsyncOpenAI) -> None:
    server.stack.engine.script = lambda submit: tokens(submit, [65])
    events = aiter(await official.responses.create(model=MODEL, input="Hi", stream=True))
    assert (await anext(events)).type == "response.created"
    server.stack.connection.engine_lost("killed by SIGKILL")
    last = [event async for event in events][-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert "SIGKILL" in last.response.error.message
