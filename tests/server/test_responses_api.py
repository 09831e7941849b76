"""/v1/responses: create, stream, store, and what is refused."""

import asyncio
from typing import Any

import httpx
import pytest
from named_events import named_events
from scripted_engine import MODEL, Stack, say, tokens

ASKED: dict[str, Any] = {"model": MODEL, "input": "Hi"}


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/responses", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return named_events(answer.text, ends_with_done=True) if fields.get("stream") else answer.json()


def prompt_text(stack: Stack, at: int = -1) -> str:
    """What the engine was asked to go on from, without special tokens."""
    ids = memoryview(stack.engine.submits[at].prompt).cast("i").tolist()
    return bytes(token for token in ids if token < 256).decode()


async def test_a_whole_response(stack: Stack, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/responses", json=ASKED, headers={"x-request-id": "abc"})
    assert answer.headers["x-request-id"] == "abc" and stack.engine.submits[0].request_id == "abc"
    body = answer.json()
    assert body.pop("created_at") > 1.7e9 and body.pop("completed_at") > 1.7e9
    mark = body.pop("id").removeprefix("resp_")
    assert len(mark) == 32 and mark != "abc"
    assert body == {
        "object": "response",
        "status": "completed",
        "model": MODEL,
        "output": [
            {
                "type": "message",
                "id": f"msg_{mark}00",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
            }
        ],
        "error": None,
        "incomplete_details": None,
        "usage": {
            "input_tokens": 22,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 28,
        },
        "background": False,
        "frequency_penalty": 0.0,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
    }


async def test_a_stream(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("hey!", each=2)
    events = await ask(client, stream=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == [] and events[2]["item"]["status"] == "in_progress"
    assert events[3]["part"]["text"] == "" and events[7]["part"]["text"] == events[6]["text"] == "hey!"
    assert [event["delta"] for event in events[4:6]] == ["he", "y!"]
    assert {event["item_id"] for event in events[3:8]} == {events[2]["item"]["id"]}
    assert events[8]["item"] == events[-1]["response"]["output"][0]
    assert events[-1]["response"]["usage"]["output_tokens"] == 5


async def test_too_few_tokens_make_it_incomplete(client: httpx.AsyncClient) -> None:
    whole = await ask(client, max_output_tokens=3)
    last = (await ask(client, max_output_tokens=3, stream=True))[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"} and response["completed_at"] is None
        assert response["output"][0]["content"][0]["text"] == "hel"


async def test_items_and_instructions_reach_the_template(stack: Stack, client: httpx.AsyncClient) -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "c"},
    ]
    await ask(client, input=items, instructions="Be brief")
    assert prompt_text(stack) == "system\nBe brief\nsystem\nrules\nuser\na\nassistant\nb\nuser\nc\nassistant\n"


async def test_every_sampling_field_reaches_the_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    response = await ask(
        client,
        temperature=0.3,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"65": -100},
        seed=11,
        min_tokens=2,
        stop_token_ids=[10],
        priority=-4,
        cache_salt="s",
        max_output_tokens=5,
        metadata={"a": "b"},
    )
    submit = stack.engine.submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert sampling.logit_bias == {65: -100.0} and sampling.seed == 11 and sampling.min_tokens == 2
    assert 10 in sampling.stop_token_ids and (submit.priority, submit.namespace) == (-4, b"s")
    assert (submit.max_new_tokens, submit.declared) == (5, True)
    asked = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "max_output_tokens", "metadata")
    assert [response[name] for name in asked] == [0.3, 0.9, 0.5, -0.5, 5, {"a": "b"}]


async def test_going_on_from_an_earlier_response(stack: Stack, client: httpx.AsyncClient) -> None:
    first = await ask(client, instructions="Only now")
    second = (await ask(client, input="And?", previous_response_id=first["id"], stream=True))[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    await client.delete(f"/v1/responses/{first['id']}")
    await ask(client, input="Go on", previous_response_id=second["id"], store=False)
    assert prompt_text(stack) == ("user\nHi\nassistant\nhello\nuser\nAnd?\nassistant\nhello\nuser\nGo on\nassistant\n")


async def test_what_is_kept_can_be_read_and_forgotten(client: httpx.AsyncClient) -> None:
    first = await ask(client, input=[{"role": "user", "content": text} for text in "abc"])
    path = f"/v1/responses/{first['id']}"
    assert (await client.get(path)).json() == first
    listed = (await client.get(f"{path}/input_items?limit=2")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["c", "b"] and listed["has_more"] is True
    assert (listed["object"], listed["first_id"], listed["last_id"]) == (
        "list",
        listed["data"][0]["id"],
        listed["data"][1]["id"],
    )
    rest = (await client.get(f"{path}/input_items?after={listed['last_id']}")).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["a"] and rest["has_more"] is False
    ascending = (await client.get(f"{path}/input_items?order=asc")).json()
    assert [item["content"][0]["text"] for item in ascending["data"]] == ["a", "b", "c"]
    assert (await client.delete(path)).json() == {"id": first["id"], "object": "response", "deleted": True}
    for answer in (await client.get(path), await client.delete(path), await client.get(f"{path}/input_items")):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


async def test_what_is_not_to_be_kept_is_not(client: httpx.AsyncClient) -> None:
    for response in (await ask(client, store=False), (await ask(client, store=False, stream=True))[-1]["response"]):
        assert response["store"] is False
        assert (await client.get(f"/v1/responses/{response['id']}")).status_code == 404
        answer = await client.post("/v1/responses", json={**ASKED, "previous_response_id": response["id"]})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id" and "store: false" in error["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nothing"])
async def test_wrong_queries(client: httpx.AsyncClient, query: str) -> None:
    path = f"/v1/responses/{(await ask(client))['id']}"
    answer = await client.get(f"{path}/input_items?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]
    assert (await client.get(f"{path}?stream=true")).json()["error"]["param"] == "stream"


async def test_fields_without_effect_are_counted_once_a_request(client: httpx.AsyncClient) -> None:
    await ask(
        client,
        user="me",
        service_tier="auto",
        include=["reasoning.encrypted_content", "web_search_call.results"],
        reasoning={"summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        stream_options=None,
        background=False,
        truncation="disabled",
        top_logprobs=0,
    )
    page = (await client.get("/metrics")).text
    for field in ("user", "service_tier", "include", "reasoning.summary"):
        assert f'tokenspeed_ignored_fields_total{{field="{field}"}} 1.0' in page


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        ({"input": []}, "input", "invalid_value", "1"),
        ({"input": None}, "input", "missing_field", "missing"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value", "developer"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_field", "missing"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_value", "array"),
        ({"input": [{"role": "user", "content": "x", "foo": 1}]}, "input[0].foo", "unknown_field", "foo"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_field",
            "pictures",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0].type",
            "unsupported_field",
            "previous_response_id",
        ),
        ({"input": [{"type": "web_search_call", "x": 1}]}, "input[0].type", "unsupported_field", "function_call"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", "missing_field", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value", "1"),
        ({"max_output_tokens": 600}, "max_output_tokens", "context_length_exceeded", "622"),
        ({"input": "x" * 600}, "input", "context_length_exceeded", "512"),
        ({"temperature": 3}, "temperature", "invalid_value", "2"),
        ({"metadata": {"a": 1}}, "metadata[...]", "invalid_value", "str"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found", "resp_x"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_field", "instructions"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "unsupported_field", "log-prob"),
        ({"truncation": "auto"}, "truncation", "unsupported_field", "silence"),
        (
            {"stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_field",
            "",
        ),
        ({"background": True}, "background", "unsupported_field", ""),
        ({"conversation": "conv_1"}, "conversation", "unsupported_field", "previous_response_id"),
        ({"top_logprobs": 2}, "top_logprobs", "unsupported_field", "chat"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_field", "function tools only"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_field", "missing"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "no_tool_format", "--tool-format"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name", "invalid_value", "letters"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported_field", "allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            "tool_choice.tools",
            "invalid_value",
            "'f'",
        ),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_field", "--thinking-switch"),
        ({"inputs": "x"}, "inputs", "unknown_field", "did you mean input"),
    ],
)
async def test_refusals(
    stack: Stack, client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str, says: str
) -> None:
    asked = {name: value for name, value in {**ASKED, **fields}.items() if value is not None}
    answer = await client.post("/v1/responses", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert says in error["message"] and error["type"] == "invalid_request_error"
    assert stack.engine.submits == []


async def test_an_engine_that_dies_in_mid_stream(stack: Stack, url: str) -> None:
    stack.engine.script = lambda submit: tokens(submit, [65])
    async with httpx.AsyncClient() as client:
        async with client.stream("POST", f"{url}/v1/responses", json={**ASKED, "stream": True}) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            stack.connection.engine_lost("killed by SIGKILL")
            text += "".join([piece async for piece in pieces])
        *events, last = named_events(text, ends_with_done=True)
        assert events[0]["type"] == "response.created" and last["type"] == "response.failed"
        assert last["sequence_number"] == len(events)
        response = last["response"]
        assert response["status"] == "failed" and response["output"][0]["status"] == "incomplete"
        assert response["error"]["code"] == "engine_error" and "SIGKILL" in response["error"]["message"]
        assert (await client.get(f"{url}/v1/responses/{response['id']}")).json() == response


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token(
    stack: Stack, client: httpx.AsyncClient, stream: bool
) -> None:
    stack.engine.pause()
    task = asyncio.create_task(client.post("/v1/responses", json={**ASKED, "stream": stream}))
    await stack.engine.heard(lambda: stack.engine.submits)
    stack.connection.engine_lost("killed by SIGKILL")
    answer = await task
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_engine(stack: Stack, url: str, stream: bool) -> None:
    stack.engine.pause()
    async with httpx.AsyncClient() as client:
        task = asyncio.create_task(client.post(f"{url}/v1/responses", json={**ASKED, "stream": stream}))
        await stack.engine.heard(lambda: stack.engine.submits)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await stack.engine.heard(lambda: stack.engine.aborts)
    assert stack.llm.open_choices == 0
