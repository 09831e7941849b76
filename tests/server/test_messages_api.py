"""/v1/messages and its count_tokens: the shapes that Anthropic's clients read."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from named_events import named_events
from scripted_engine import MODEL, Stack, say, scripted_config, tokens

from tokenspeed.server.app import create_app

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "something-2026-01-01", "x-request-id": "abc"}


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/messages", json={**ASKED, **fields}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return named_events(answer.text) if fields.get("stream") else answer.json()


def prompt_text(stack: Stack, at: int = -1) -> str:
    """What the engine was asked to go on from, without special tokens."""
    ids = memoryview(stack.engine.submits[at].prompt).cast("i").tolist()
    return bytes(token for token in ids if token < 256).decode()


async def test_a_whole_message(stack: Stack, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json=ASKED, headers=HEADERS)
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "abc"
    assert stack.engine.submits[0].request_id == "abc" and stack.engine.submits[0].max_new_tokens == 64
    assert answer.json() == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 19,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 6,
        },
    }


async def test_a_stream(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("hey!", each=2)
    start, *between, delta, stop = await ask(client, stream=True)
    message = start["message"]
    assert start["type"] == "message_start" and message["id"] == "msg_abc" and message["content"] == []
    assert message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 22
    assert between == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "", "citations": None}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "he"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "y!"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 5 and delta["usage"]["cache_read_input_tokens"] == 3
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_sequences": ["zz", "lo"]}, "stop_sequence", "lo"),
        ({"max_tokens": 3}, "max_tokens", None),
    ],
)
async def test_stop_reasons(
    client: httpx.AsyncClient, stream: bool, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = await ask(client, stream=stream, **fields)
    end = answer[-2]["delta"] if stream else answer
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)
    text = "".join(e["delta"]["text"] for e in answer if e["type"] == "content_block_delta") if stream else None
    whole = text if stream else answer["content"][0]["text"]
    assert whole == {"end_turn": "hello", "stop_sequence": "hel", "max_tokens": "hel"}[reason]


async def test_an_answer_without_text_has_no_blocks(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("")
    assert (await ask(client))["content"] == []
    assert [event["type"] for event in await ask(client, stream=True)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]


async def test_what_reaches_template_and_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    await ask(
        client,
        system=[
            {"type": "text", "text": "Be"},
            {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
    )
    assert prompt_text(stack) == "system\nBe\nbrief\nuser\na\nb\nassistant\nc\nuser\nd\nassistant\n"
    sampling = stack.engine.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


async def test_an_assistants_last_message_is_gone_on_with(stack: Stack, client: httpx.AsyncClient) -> None:
    await ask(client, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "I say"}])
    assert prompt_text(stack).endswith("assistant\nI say")


async def test_counting_is_the_prompts_length(client: httpx.AsyncClient) -> None:
    asked = {"model": MODEL, "system": "Be brief", "messages": ASKED["messages"]}
    answer = await client.post("/v1/messages/count_tokens", json=asked)
    usage = (await ask(client, system="Be brief"))["usage"]
    assert answer.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_field_without_effect_is_logged_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        await ask(client, metadata={"user_id": "me"})
    assert [record.args for record in caplog.records if "no effect" in record.message] == [("metadata",)]


async def test_fields_without_effect_are_counted_once_a_request(client: httpx.AsyncClient) -> None:
    marked = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    await ask(
        client,
        system=[marked],
        messages=[{"role": "user", "content": [marked, marked]}],
        metadata={"user_id": "me"},
        service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 2000},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    page = (await client.get("/metrics")).text
    for field in ("cache_control", "metadata", "service_tier", "thinking", "thinking.budget_tokens"):
        assert f'tokenspeed_ignored_fields_total{{field="{field}"}} 1.0' in page


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body == {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
    message: str = body["error"]["message"]
    return message


USER = {"role": "user", "content": "x"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "pictures"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "only who wrote"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type is tool_use"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages[1].content ends with a tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "name": "y"}]}]}, "content[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "nam": 1}]}]}, "nam is not a field"),
        ({"system": [{"type": "thinking", "thinking": "x"}]}, "system[0].type is thinking"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "f", "input_schema": {}, "nam": 1}]}, "tools[0].nam is not a field"),
        ({"tools": [{"name": 5, "input_schema": {}}]}, "tools[0].name: expected `str`"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"thinking": {"type": "maybe"}}, "thinking.type is 'maybe'"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"mcp_servers": [{"url": "x"}]}, "calls no tools itself"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "never edited in silence"),
        ({"stop_sequence": ["x"]}, "did you mean stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "512"),
    ],
)
async def test_refusals(stack: Stack, client: httpx.AsyncClient, fields: dict[str, Any], says: str) -> None:
    asked = {name: value for name, value in {**ASKED, **fields}.items() if value is not None}
    answer = await client.post("/v1/messages", json=asked)
    assert says in error_of(answer, 400, "invalid_request_error")
    assert stack.engine.submits == []


async def test_errors_of_every_kind_have_the_shape(stack: Stack, client: httpx.AsyncClient) -> None:
    other = await client.post("/v1/messages", json={**ASKED, "model": "other"})
    assert MODEL in error_of(other, 404, "not_found_error")
    error_of(await client.get("/v1/messages"), 405, "invalid_request_error")
    error_of(await client.get("/v1/messages/batches"), 404, "not_found_error")
    error_of(await client.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    error_of(await client.post("/v1/messages", content=b" " * (33 << 20)), 413, "request_too_large")
    late = {"x-request-deadline": "1000"}
    error_of(await client.post("/v1/messages", json=ASKED, headers=late), 504, "timeout_error")
    stack.connection.engine_lost("killed by SIGKILL")
    for stream in (False, True):
        answer = await client.post("/v1/messages", json={**ASKED, "stream": stream})
        assert "SIGKILL" in error_of(answer, 503, "overloaded_error") and int(answer.headers["retry-after"]) > 0


async def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a-key\n")
    stack = Stack(scripted_config(api_key_file=str(path)))
    await stack.new_engine()
    transport = httpx.ASGITransport(create_app(stack.llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        error_of(await client.post("/v1/messages", json=ASKED), 401, "authentication_error")
        assert (await client.post("/v1/messages", json=ASKED, headers={"x-api-key": "a-key"})).status_code == 200
    await stack.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token(
    stack: Stack, client: httpx.AsyncClient, stream: bool
) -> None:
    stack.engine.pause()
    task = asyncio.create_task(client.post("/v1/messages", json={**ASKED, "stream": stream}))
    await stack.engine.heard(lambda: stack.engine.submits)
    stack.connection.engine_lost("killed by SIGKILL")
    assert "SIGKILL" in error_of(await task, 500, "api_error")


async def test_an_engine_that_dies_in_mid_stream(stack: Stack, url: str) -> None:
    stack.engine.script = lambda submit: tokens(submit, [65])
    body = {**ASKED, "stream": True}
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/messages", json=body) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        stack.connection.engine_lost("killed by SIGKILL")
        text += "".join([piece async for piece in pieces])
    *events, last = named_events(text)
    assert events[0]["type"] == "message_start" and all(event["type"] != "message_stop" for event in events)
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "SIGKILL" in last["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_engine(stack: Stack, url: str, stream: bool) -> None:
    stack.engine.pause()
    async with httpx.AsyncClient() as client:
        task = asyncio.create_task(client.post(f"{url}/v1/messages", json={**ASKED, "stream": stream}))
        await stack.engine.heard(lambda: stack.engine.submits)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await stack.engine.heard(lambda: stack.engine.aborts)
    assert stack.llm.open_choices == 0
