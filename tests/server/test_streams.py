"""Streams: comments while nothing comes, slow readers, one finish a choice, and bounds of connections."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from app_server import serving
from fastapi import FastAPI
from scripted_engine import MODEL, Stack, say, scripted_config, tokens

from tokenspeed.launch import connections
from tokenspeed.launch.connections import ConnectionBounds, connections_within
from tokenspeed.server import body
from tokenspeed.server.app import create_app
from tokenspeed.server.stream import KEEP_ALIVE

SOON_S = 0.05
"""Short, and nothing is measured by it: the tests wait for what follows from it."""

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


@contextlib.asynccontextmanager
async def made(**api: object) -> AsyncIterator[tuple[Stack, FastAPI]]:
    stack = Stack(scripted_config(**api))
    await stack.new_engine()
    try:
        yield stack, create_app(stack.llm)
    finally:
        await stack.close()


def bounds(**changes: Any) -> ConnectionBounds:
    def nothing(reason: str) -> None:
        del reason

    return ConnectionBounds(**{"most": 0, "slow_reader_s": 0, "refused": nothing, "cut": nothing, **changes})


async def test_comments_while_nothing_comes() -> None:
    async with made(keep_alive_s=SOON_S) as (stack, app), serving(app) as url:
        stack.engine.pause()
        async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            assert answer.status_code == 200 and await anext(lines) == ": keep-alive"
            stack.engine.resume()
            rest = [line async for line in lines if line and line != ": keep-alive"]
    assert rest[-1] == "data: [DONE]" and text_of(rest) == "hello"


def text_of(lines: list[str]) -> str:
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in found for choice in chunk["choices"])


@pytest.mark.parametrize("kind", ["chat", "plain"])
async def test_the_official_client_passes_over_comments(kind: str) -> None:
    async with made(keep_alive_s=SOON_S) as (stack, app), serving(resumed_by_comments(app, stack)) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stack.engine.pause()
        text = ""
        if kind == "chat":
            messages: Any = [{"role": "user", "content": "Hi"}]
            async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, stream=True):
                text += chunk.choices[0].delta.content or ""
        else:
            async for plain in await client.completions.create(model=MODEL, prompt="x", stream=True):
                text += plain.choices[0].text
        assert text == "hello"
        await client.close()


def resumed_by_comments(app: FastAPI, stack: Stack) -> Any:
    """The application; the second comment that it sends lets the engine go on."""
    seen = 0

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def counting(message: Any) -> None:
            nonlocal seen
            seen += message.get("body") == KEEP_ALIVE
            if seen == 2:
                stack.engine.resume()
            await send(message)

        await app(scope, receive, counting)

    return wrapped


async def test_what_fails_after_a_comment_is_an_event() -> None:
    async with made(keep_alive_s=SOON_S) as (stack, app), serving(app) as url:
        stack.engine.pause()
        async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            stack.connection.engine_lost("SIGKILL")
            rest = [line async for line in lines if line and line != ": keep-alive"]
    assert len(rest) == 2 and "SIGKILL" in json.loads(rest[0].removeprefix("data: "))["error"]["message"]
    assert rest[1] == "data: [DONE]"


async def test_without_an_interval_the_status_waits_for_the_first_token() -> None:
    async with made(keep_alive_s=0.0) as (stack, app), serving(app) as url, httpx.AsyncClient() as client:
        stack.engine.pause()
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=STREAM))
        await stack.engine.heard(lambda: stack.engine.submits)
        stack.connection.engine_lost("SIGKILL")
        assert (await asking).status_code == 500


@pytest.mark.parametrize("each", [1, 3, 100])
async def test_each_choice_finishes_once(each: int) -> None:
    async with made() as (stack, app), serving(app) as url, httpx.AsyncClient() as client:
        stack.engine.script = say("one two three", each=each)
        asked = {**STREAM, "n": 3, "stop": ["three", " two"]}
        answer = (await client.post(f"{url}/v1/completions", json=asked)).text
        ends = re.findall(r'"index":(\d),"text":"","logprobs":null,"finish_reason":"(\w+)"', answer)
        assert sorted(ends) == [("0", "stop"), ("1", "stop"), ("2", "stop")]
        assert answer.count('"finish_reason":"') == 3 and answer.count("data: [DONE]") == 1


class HeldReader:
    """An ASGI client that stops reading after the first chunk until it is told to go on."""

    def __init__(self, app: FastAPI, asked: dict[str, Any]) -> None:
        self.held = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.received = b""
        self._body = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
        }
        self.task = asyncio.ensure_future(self._run(app, scope))

    async def _run(self, app: Callable[..., Awaitable[None]], scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self.held.set()
            await self.goes_on.wait()
            self.received += message["body"]


async def test_too_much_that_waits_ends_the_request_and_no_other() -> None:
    async with made(stream_buffer_bytes=20_000) as (stack, app):
        stack.engine.script = lambda submit: tokens(submit, *([65] for _ in range(450)))
        reader = HeldReader(app, {**STREAM, "ignore_eos": True})
        await reader.held.wait()
        await stack.engine.heard(lambda: stack.engine.aborts)
        assert stack.llm.open_choices == 0
        stack.engine.script = say("hello")
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/v1/completions", json={**STREAM, "stream": False})
            assert answer.json()["choices"][0]["text"] == "hello", "while the other one is held"
            reader.goes_on.set()
            await reader.task
            events = reader.received.decode().strip().split("\n\n")
            assert events[-1] == "data: [DONE]" and '"code":"slow_reader"' in events[-2]
            text = text_of(events[:-2])
            assert set(text) == {"A"} and 10 < len(text) < 200 and '"finish_reason":"' not in reader.received.decode()
            page = (await client.get("/metrics")).text
            assert 'tokenspeed_streams_cut_total{reason="buffer"} 1.0' in page


async def test_a_slow_reader_within_the_bound_gets_everything() -> None:
    async with made(stream_buffer_bytes=1 << 20) as (stack, app):
        stack.engine.script = say("A" * 400)
        reader = HeldReader(app, {**STREAM, "ignore_eos": True})
        await reader.held.wait()
        while stack.llm.open_choices:
            await asyncio.sleep(0)
        reader.goes_on.set()
        await reader.task
        assert text_of(reader.received.decode().split("\n\n")) == "A" * 400
        assert stack.engine.aborts == []


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    cut: list[str] = []
    async with (
        made(stream_buffer_bytes=0) as (stack, app),
        serving(app, bounds=bounds(slow_reader_s=SOON_S, cut=cut.append), send_buffer=4096) as url,
    ):
        stack.engine.script = lambda submit: tokens(submit, *([65] for _ in range(500)))
        port = int(url.rpartition(":")[2])
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, posted({**STREAM, "n": 8, "ignore_eos": True}))
            await stack.engine.heard(lambda: len(stack.engine.aborts) == 8)
        assert cut == ["stalled"] and stack.llm.open_choices == 0


def posted(asked: dict[str, Any]) -> bytes:
    content = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def test_connections_beyond_the_bound_reach_the_probes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROBE_CONNECTIONS", 1)
    refused: list[str] = []
    async with (
        made() as (_, app),
        serving(app, bounds=bounds(most=1, refused=refused.append)) as url,
        httpx.AsyncClient(base_url=url) as first,
        httpx.AsyncClient(base_url=url) as second,
        httpx.AsyncClient(base_url=url) as third,
    ):
        assert (await first.get("/v1/models")).status_code == 200
        assert (await second.get("/ready")).status_code == 200
        answer = await third.get("/ready")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_connections"
        answer = await second.get("/v1/models")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_connections"
        assert answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
        assert (await first.get("/v1/models")).status_code == 200, "who is in stays in"
        assert refused == ["too_many_connections"] * 2


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async with made() as (_, app), serving(app, bounds=bounds(head_s=SOON_S)) as url:
        for begun in (b"", b"GET /live HTTP/1.1\r\nhost:"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(begun)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", SOON_S)
    async with made() as (_, app), serving(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(posted(STREAM)[:-3])
        answer = (await reader.read()).decode()
        writer.close()
    assert answer.startswith("HTTP/1.1 408") and '"code":"request_timeout"' in answer


def test_a_bound_that_open_files_do_not_allow_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1024, 1024))
    assert [connections_within(most) for most in (0, 100, 768, 4096)] == [768, 100, 768, 768]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (connections.resource.RLIM_INFINITY,) * 2)
    assert [connections_within(most) for most in (0, 4096)] == [0, 4096]
