"""Every error has OpenAI's shape, the right status, and says what was wrong."""

from typing import Any

import httpx
import pytest
from events import events_of
from scripted_engine import CONTEXT, MODEL, VOCABULARY, Stack, tokens

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"] and body["error"]["type"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param", "code", "says"),
    [
        ("chat", {"temperature": "hot"}, "temperature", "invalid_value", "float"),
        ("chat", {"temperature": 99}, "temperature", "invalid_value", "2"),
        ("chat", {"temperature": -0.1}, "temperature", "invalid_value", "0"),
        ("chat", {"top_p": 0}, "top_p", "invalid_value", "0"),
        ("chat", {"n": 0}, "n", "invalid_value", "1"),
        ("chat", {"n": 129}, "n", "invalid_value", "128"),
        ("chat", {"n": True}, "n", "invalid_value", "int"),
        ("chat", {"max_tokens": 0}, "max_tokens", "invalid_value", "1"),
        ("chat", {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value", "5"),
        ("chat", {"stop": ""}, "stop", "invalid_value", "length"),
        ("chat", {"stop": ["a", ""]}, "stop[1]", "invalid_value", "length"),
        ("chat", {"stop": ["a"] * 17}, "stop", "invalid_value", "16"),
        ("chat", {"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", "invalid_value", str(VOCABULARY)),
        ("chat", {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "'x'"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias[...]", "invalid_value", "100"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs: true"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "20"),
        ("chat", {"stream_options": {}}, "stream_options", "invalid_value", "stream: true"),
        ("chat", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_field", "x"),
        ("chat", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value", "stream"),
        ("chat", {"temprature": 1}, "temprature", "unknown_field", "did you mean temperature"),
        ("chat", {"zzzz": 1}, "zzzz", "unknown_field", "docs/api.md"),
        ("chat", {"best_of": 2}, "best_of", "unknown_field", "best_of"),
        ("chat", {"functions": [{"name": "f"}]}, "functions", "unsupported_field", "send tools"),
        ("completion", {"tools": [{}]}, "tools", "unsupported_field", "/v1/chat/completions"),
        ("completion", {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_field", "/v1/chat/completions"),
        ("chat", {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_field", "--thinking-switch"),
        ("chat", {"reasoning_effort": "lots"}, "reasoning_effort", "invalid_value", "xhigh"),
        ("chat", {"messages": []}, "messages", "invalid_value", "1"),
        ("chat", {"messages": "hi"}, "messages", "invalid_value", "array"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "missing_field", "content"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role", "missing_field", "role"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value", "developer"),
        ("chat", {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unsupported_field", "tool"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_field", "tool"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
            "messages[0].tool_call_id",
            "invalid_value",
            "a tool's",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "reasoning": "y"}]},
            "messages[0].reasoning",
            "invalid_value",
            "an assistant's",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
            "invalid_value",
            "an assistant's",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].type",
            "unsupported_field",
            "function tools only",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
            "missing_field",
            "function",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": []}]},
            "messages[0].content",
            "missing_field",
            "content",
        ),
        ("chat", {"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo", "unknown_field", "foo"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_field",
            "does not take pictures yet",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_field",
            "text only",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
            "messages[0].tool_calls[0]",
            "invalid_value",
            "object",
        ),
        (
            "chat",
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
            "exclude",
        ),
        ("completion", {"suffix": "x"}, "suffix", "unsupported_field", "gaps"),
        ("completion", {"max_tokens": 0}, "max_tokens", "invalid_value", "echo"),
        ("completion", {"best_of": 2, "stream": True}, "best_of", "invalid_value", "streamed"),
        ("completion", {"best_of": 1, "n": 2}, "best_of", "invalid_value", "n to"),
        ("completion", {"logprobs": 21}, "logprobs", "invalid_value", "20"),
        ("completion", {"prompt": ["x"] * 513, "n": 2}, "prompt", "invalid_value", "1024"),
        ("completion", {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "invalid_value", "at most 3"),
        ("completion", {"stop_token_ids": [VOCABULARY]}, "stop_token_ids", "invalid_value", str(VOCABULARY)),
        ("completion", {"cache_salt": ""}, "cache_salt", "invalid_value", "length"),
        ("completion", {"priority": 1 << 31}, "priority", "invalid_value", "int"),
        ("completion", {"seed": 1 << 63}, "seed", "invalid_value", "int"),
    ],
)
async def test_bad_fields(
    stack: Stack, client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str, code: str, says: str
) -> None:
    """Known failures 27 and 29 and their kind."""
    route, base = ("/v1/chat/completions", CHAT) if path == "chat" else ("/v1/completions", COMPLETION)
    error = error_of(await client.post(route, json={**base, **fields}), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert says in error["message"]
    assert stack.engine.submits == []


@pytest.mark.parametrize("body", ["chat", "completion"])
async def test_a_prompt_longer_than_the_context(stack: Stack, client: httpx.AsyncClient, body: str) -> None:
    """Known failure 28."""
    route, json = (
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 600}]})
        if body == "chat"
        else ("/v1/completions", {**COMPLETION, "prompt": "x" * 619})
    )
    error = error_of(await client.post(route, json=json), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert str(CONTEXT) in error["message"] and "620" in error["message"] and "-" not in error["message"]
    error = error_of(await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 510}), 400)
    assert error["param"] == "max_tokens" and "513" in error["message"]
    assert stack.engine.submits == []


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    """Known failure 30, first half."""
    for route, json in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/tokenize", COMPLETION)):
        error = error_of(await client.post(route, json={**json, "model": "gpt-9"}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert "'gpt-9'" in error["message"] and f"'{MODEL}'" in error["message"]
    error_of(await client.get("/v1/models/org/gpt-9"), 404)
    error = error_of(await client.post("/v1/completions", json={"prompt": "x"}), 400)
    assert (error["param"], error["code"]) == ("model", "missing_field")


async def test_paths_that_are_none(url: str) -> None:
    """Known failure 30, second half; over a real connection, because clients tidy paths up."""
    async with httpx.AsyncClient() as client:
        error = error_of(await client.post(f"{url}//v1/chat/completions", json=CHAT), 404)
        assert "double slash" in error["message"]
        for path in ("/v1/chat/completion", "/", "/v1/chat/completions/"):
            assert error_of(await client.get(url + path), 404)["code"] == "not_found"


async def test_wrong_methods(client: httpx.AsyncClient) -> None:
    """Known failure 31."""
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/v1/models", "GET")):
        answer = await client.request(method, path)
        assert error_of(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_wrong_content_types(client: httpx.AsyncClient, content_type: str) -> None:
    answer = await client.post("/v1/completions", content=b"{}", headers={"content-type": content_type})
    assert "Content-Type: application/json" in error_of(answer, 415)["message"]


async def test_content_types_that_will_do(client: httpx.AsyncClient) -> None:
    for headers in (
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": "application/vnd.x+json"},
        {},
    ):
        answer = await client.post("/v1/completions", content=b'{"model":"scripted","prompt":"x"}', headers=headers)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"model": "scripted", "prompt": "x"',
        b'{"model": "scripted", "prompt": "x",}',
        b"\xff\xfe",
        b'{"model": "scripted", "prompt": "\xff"}',
        b'{"model": "scripted", "prompt": "\\ud800"}',
        b'{"model": "scripted", "prompt": "x", "temperature": NaN}',
        b'{"model": "scripted", "prompt": "x"} trailing',
        b'{"model": "scripted", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_broken_json(client: httpx.AsyncClient, content: bytes) -> None:
    answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert error_of(answer, 400)["code"] in ("invalid_json", "invalid_value")


@pytest.mark.parametrize("content", [b"[]", b'"x"', b"1", b"null"])
async def test_json_that_is_no_object(client: httpx.AsyncClient, content: bytes) -> None:
    answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert "object" in error_of(answer, 400)["message"]


async def test_a_body_of_fifty_megabytes(url: str) -> None:
    """Over a real connection: the client must see the answer, not a broken pipe."""
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(
            f"{url}/v1/completions", content=b" " * 50_000_000, headers={"content-type": "application/json"}
        )
        error = error_of(answer, 413)
        assert error["code"] == "request_too_large" and str(32 << 20) in error["message"]

        async def chunks() -> Any:
            for _ in range(40):
                yield b" " * (1 << 20)

        answer = await client.post(
            f"{url}/v1/completions", content=chunks(), headers={"content-type": "application/json"}
        )
        assert error_of(answer, 413)["code"] == "request_too_large"
        answer = await client.post(f"{url}/v1/completions", json=COMPLETION)
        assert answer.status_code == 200


async def test_no_chat_template(client: httpx.AsyncClient, stack: Stack) -> None:
    """Known failure 33."""
    stack.llm._template = None
    error = error_of(await client.post("/v1/chat/completions", json=CHAT), 400)
    assert error["code"] == "no_chat_template" and "--chat-template" in error["message"]


async def test_a_template_that_refuses(client: httpx.AsyncClient, stack: Stack) -> None:
    from tokenspeed.frontend.chat_template import ChatTemplate

    stack.llm._template = ChatTemplate("{{ raise_exception('roles must alternate') }}", "", "")
    error = error_of(await client.post("/v1/chat/completions", json=CHAT), 400)
    assert error["code"] == "chat_template_error" and "roles must alternate" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_not_ready(stack: Stack, client: httpx.AsyncClient, stream: bool) -> None:
    stack.connection.engine_lost("killed by SIGKILL")
    answer = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert "SIGKILL" in error_of(answer, 503)["message"] and int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token(
    stack: Stack, client: httpx.AsyncClient, stream: bool
) -> None:
    import asyncio

    stack.engine.pause()
    task = asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "stream": stream}))
    await stack.engine.heard(lambda: stack.engine.submits)
    stack.connection.engine_lost("killed by SIGKILL")
    error = error_of(await task, 500)
    assert error["code"] == "engine_error" and "SIGKILL" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_engine_that_dies_in_mid_stream(stack: Stack, url: str, path: str) -> None:
    """Known failures 19 and 34: an error event, then [DONE]."""
    stack.engine.script = lambda submit: tokens(submit, [65])
    base = CHAT if "chat" in path else COMPLETION
    body = {**base, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient() as client, client.stream("POST", url + path, json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_text()
        text = await anext(pieces)
        stack.connection.engine_lost("killed by SIGKILL")
        text += "".join([piece async for piece in pieces])
    *chunks, last = events_of(text)
    assert chunks and "SIGKILL" in last["error"]["message"] and last["error"]["code"] == "engine_error"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


async def test_an_error_of_ours(client: httpx.AsyncClient, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack.llm, "start", None)
    error = error_of(await client.post("/v1/completions", json=COMPLETION), 500)
    assert error["type"] == "server_error" and error["code"] == "internal_error"
    assert "NoneType" not in error["message"]
