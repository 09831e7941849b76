"""Tool use and thinking through /v1/messages, streamed and not, and what of it reaches the template."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from app_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from named_events import named_events
from parsed_answers import FAMILIES
from parsing_server import FORMATS, ParsingServer, parsing_server
from scripted_engine import MODEL, say

from tokenspeed.server.anthropic.answers import input_of

WEATHER = {
    "name": "weather",
    "description": "Tells it",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
TOOLS: list[Any] = [WEATHER, {"name": "time", "input_schema": {"type": "object", "properties": {}}}]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": TOOLS,
}
TWO = FAMILIES["hermes"].two


@pytest.fixture
async def server() -> AsyncIterator[ParsingServer]:
    async with parsing_server(*FORMATS) as server:
        server.say(TWO)
        yield server


async def ask(server: ParsingServer, **fields: Any) -> Any:
    answer = await server.client.post("/v1/messages", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return named_events(answer.text) if fields.get("stream") else answer.json()


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


async def test_a_whole_message_with_calls(server: ParsingServer) -> None:
    message = await ask(server)
    thinking, text, first, second = message["content"]
    assert thinking["type"] == "thinking" and thinking["thinking"] == "I ask." and thinking["signature"]
    assert text == {"type": "text", "text": "Let me see.", "citations": None}
    assert first["id"] != second["id"]
    assert without_ids([first, second]) == [
        {"type": "tool_use", "name": "weather", "input": {"city": "Köln", "days": 2}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_the_events_of_a_stream_with_calls(server: ParsingServer) -> None:
    server.say(TWO, each=1000)
    events = await ask(server, stream=True)
    assert [(e["type"], e.get("index"), e.get("delta", e.get("content_block", {})).get("type")) for e in events] == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, "tool_use"),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert events[9]["content_block"]["input"] == {} and events[9]["content_block"]["name"] == "weather"
    assert json.loads(events[10]["delta"]["partial_json"]) == {"city": "Köln", "days": 2}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the events of a stream make; asserts that each begins, grows and ends in its turn."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    running = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks) and not running
                running = True
                blocks.append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1 and running
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    (name,) = set(delta) - {"type"}
                    blocks[-1][name] += delta[name]
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1 and running
                running = False
    assert not running
    for index, text in inputs.items():
        blocks[index]["input"] = input_of(text)
    return blocks


@settings(max_examples=15, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    each=st.integers(1, 40),
    cut=st.integers(1, 300),
    stop=st.sampled_from([[], ["see"], ["days"]]),
    lead=st.text(max_size=5),
)
async def test_streams_say_the_same_as_whole_answers(
    family: str, each: int, cut: int, stop: list[str], lead: str
) -> None:
    one = FAMILIES[family]
    async with parsing_server(one.tools, one.reasoning, "") as server:
        server.say(lead + one.two, each=each)
        fields: dict[str, Any] = {"max_tokens": cut, "stop_sequences": stop}
        whole, events = await ask(server, **fields), await ask(server, **fields, stream=True)
    assert without_ids(joined(events)) == without_ids(whole["content"])
    end = events[-2]
    assert end["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    assert end["usage"] == whole["usage"] and events[-1] == {"type": "message_stop"}


async def test_a_call_that_was_cut_off_keeps_what_is_whole(server: ParsingServer) -> None:
    server.say('<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days')
    message = await ask(server)
    assert message["content"][0]["input"] == {"city": "Köln"}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [("", {}), ("{}", {}), ('{"a": [1, 2', {"a": [1, 2]}), ("[1]", {"arguments": "[1]"}), ("x", {"arguments": "x"})],
)
def test_input_is_always_an_object(arguments: str, wanted: dict[str, Any]) -> None:
    assert input_of(arguments) == wanted


async def test_an_answer_goes_back_to_the_template(server: ParsingServer) -> None:
    message = await ask(server)
    results = [
        {"type": "tool_result", "tool_use_id": message["content"][2]["id"], "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": message["content"][3]["id"],
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "clock"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    blocks = [{**block, "cache_control": {"type": "ephemeral"}} for block in message["content"]]
    for block in blocks:
        block.pop("citations", None)
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    await ask(server, messages=[*ASKED["messages"], *turns])
    given_ = server.given()
    assert [tool["function"] for tool in given_["tools"]] == [
        {"name": "weather", "description": "Tells it", "parameters": WEATHER["input_schema"]},
        {"name": "time", "parameters": {"type": "object", "properties": {}}},
    ]
    user, assistant, sunny, clock, well = given_["messages"]
    assert user == {"role": "user", "content": "Hi"} and well == {"role": "user", "content": "Well?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "I ask.")
    ids = [message["content"][2]["id"], message["content"][3]["id"]]
    assert [call["id"] for call in assistant["tool_calls"]] == ids
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Köln", "days": 2}}
    assert sunny == {"role": "tool", "tool_call_id": ids[0], "content": "sunny"}
    assert clock == {"role": "tool", "tool_call_id": ids[1], "content": "Error: no\nclock"}


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, True, "high"),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"output_config": {"effort": "low"}}, True, "low"),
    ],
)
async def test_thinking_reaches_the_template(
    server: ParsingServer, fields: dict[str, Any], thinking: bool | None, effort: str | None
) -> None:
    await ask(server, **fields)
    assert (server.given()["thinking"], server.given()["effort"]) == (thinking, effort)


async def test_thinking_that_cannot_be_switched_off_is_said() -> None:
    async with parsing_server("hermes", "qwen3", "") as server:
        answer = await server.client.post("/v1/messages", json={**ASKED, "thinking": {"type": "disabled"}})
        assert answer.status_code == 400 and "--thinking-switch" in answer.json()["error"]["message"]
        await ask(server, thinking={"type": "enabled", "budget_tokens": 1024})


async def test_tool_choice(server: ParsingServer) -> None:
    message = await ask(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["name"] for block in message["content"] if block["type"] == "tool_use"] == ["weather"]
    message = await ask(server, tool_choice={"type": "none"})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert server.given()["tools"] is None and message["stop_reason"] == "end_turn"


async def test_a_model_without_a_format_for_calls_says_so() -> None:
    async with parsing_server("", "", "") as server:
        answer = await server.client.post("/v1/messages", json=ASKED)
        assert answer.status_code == 400 and "--tool-format" in answer.json()["error"]["message"]
        answer = await server.client.post("/v1/messages/count_tokens", json={**ASKED, "max_tokens": None})
        assert answer.status_code == 400


async def test_refusals_of_the_shared_path_have_the_names_of_this_door(server: ParsingServer) -> None:
    async def refused(**fields: Any) -> str:
        answer = await server.client.post("/v1/messages", json={**ASKED, **fields})
        assert answer.status_code == 400
        message: str = answer.json()["error"]["message"]
        return message

    assert (await refused(tools=[{**WEATHER, "name": "a b"}])).startswith("tools[0].name is 'a b'")
    async with parsing_server("gpt_oss", "gpt_oss", "reasoning_effort") as other:
        fields = {**ASKED, "output_config": {"effort": "max"}}
        answer = await other.client.post("/v1/messages", json=fields)
        assert answer.json()["error"]["message"].startswith("output_config.effort is 'max'")


async def test_counting_counts_tools(server: ParsingServer) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    with_tools = (await server.client.post("/v1/messages/count_tokens", json=asked)).json()["input_tokens"]
    asked.pop("tools")
    without = (await server.client.post("/v1/messages/count_tokens", json=asked)).json()["input_tokens"]
    usage = (await ask(server))["usage"]
    assert without < with_tools == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_the_official_clients_tool_loop(server: ParsingServer) -> None:
    async with serving(server.app) as url, anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        asked: dict[str, Any] = {name: ASKED[name] for name in ("model", "max_tokens", "tools")}
        messages: list[Any] = list(ASKED["messages"])
        async with client.messages.stream(**asked, messages=messages) as stream:
            seen = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= set(seen)
        calls = [block for block in message.content if isinstance(block, anthropic.types.ToolUseBlock)]
        assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Köln", "days": 2}), ("time", {})]
        thoughts = message.content[0]
        assert isinstance(thoughts, anthropic.types.ThinkingBlock) and thoughts.thinking == "I ask."
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        server.stack.engine.script = say("Sunny.")
        answer = await client.messages.create(**asked, messages=messages)
        assert isinstance(answer.content[0], anthropic.types.TextBlock) and answer.content[0].text == "Sunny."
        assert [m["role"] for m in server.given()["messages"]] == ["user", "assistant", "tool", "tool"]
