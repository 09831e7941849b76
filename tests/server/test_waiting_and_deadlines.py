"""The line in front of the engine, deadlines, and limits of single requests."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from scripted_engine import CONTEXT, MODEL, Stack, scripted_config, tokens

from tokenspeed.frontend.errors import LineFull
from tokenspeed.frontend.generation import Generation
from tokenspeed.frontend.line import LONGEST_S, UNKNOWN_S, WINDOW_S, WaitingLine
from tokenspeed.server.app import create_app

ASKED: dict[str, Any] = {"model": MODEL, "prompt": "x"}
SOON_S = 0.05


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def retry_after(line: WaitingLine) -> int:
    with pytest.raises(LineFull) as raised:
        line.check()
    return raised.value.retry_after_s


def test_the_estimate_goes_by_the_present_rate() -> None:
    clock = Clock()
    line = WaitingLine(10, clock)
    line.joined(9)
    line.check()
    line.joined(21)
    assert retry_after(line) == UNKNOWN_S
    for _ in range(10):  # one every two seconds
        clock.now += 2.0
        line.began()
    assert (line.waiting, retry_after(line)) == (20, 20), "11 more have to begin; 10 did in the 18 s since the first"
    clock.now += WINDOW_S + 1
    assert retry_after(line) == UNKNOWN_S, "what was a minute ago says nothing"
    for _ in range(100):
        line.joined(1)
        line.began()
    assert retry_after(line) == 1
    line.joined(10**6)
    assert retry_after(line) == LONGEST_S
    for _ in range(10**6 + 20 - 9):
        line.left()
    line.check()


def test_without_a_bound_everybody_may_wait() -> None:
    line = WaitingLine(0)
    line.joined(10**6)
    line.check()


@contextlib.asynccontextmanager
async def made(**api: object) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    stack = Stack(scripted_config(**api))
    await stack.new_engine()
    transport = httpx.ASGITransport(create_app(stack.llm), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield stack, client
    finally:
        await stack.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_too_many_that_wait_are_refused_and_room_is_seen(path: str) -> None:
    asked = {"model": MODEL, **({"prompt": "x"} if path == "/v1/completions" else {})}
    if "prompt" not in asked:
        asked["messages"] = [{"role": "user", "content": "x"}]  # type: ignore[assignment]
    async with made(max_waiting=3) as (stack, client):
        stack.engine.pause()
        calls = [asyncio.create_task(client.post(path, json={**asked, "n": 2})) for _ in range(2)]
        await stack.engine.heard(lambda: len(stack.engine.submits) == 4)
        assert stack.llm.waiting_choices == 4
        answer = await client.post(path, json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
        assert answer.headers["retry-after"] == str(UNKNOWN_S)
        assert len(stack.engine.submits) == 4
        stack.engine.resume()
        assert [(await call).status_code for call in calls] == [200, 200]
        assert stack.llm.waiting_choices == 0
        assert (await client.post(path, json=asked)).status_code == 200
        page = (await client.get("/metrics")).text
        assert 'tokenspeed_requests_refused_total{reason="queue_full"} 1.0' in page


async def test_what_runs_does_not_wait_and_what_is_lost_leaves_the_line() -> None:
    async with made(max_waiting=1) as (stack, client):
        stack.engine.script = lambda submit: tokens(submit, [65])
        running = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        await stack.engine.heard(lambda: stack.engine.submits)
        while stack.llm.waiting_choices:
            await asyncio.sleep(0)
        stack.engine.pause()
        waiting = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        await stack.engine.heard(lambda: len(stack.engine.submits) == 2)
        assert (stack.llm.open_choices, stack.llm.waiting_choices) == (2, 1)
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 429
        stack.connection.engine_lost("SIGKILL")
        assert [(await call).status_code for call in (running, waiting)] == [500, 500]
        assert stack.llm.waiting_choices == 0


@pytest.mark.parametrize("how", ["field", "header", "server"])
async def test_a_deadline_ends_the_work(how: str) -> None:
    async with made(max_request_s=SOON_S if how == "server" else 0.0) as (stack, client):
        stack.engine.pause()
        headers = {"X-Request-Deadline": str(time.time() + SOON_S)} if how == "header" else {}
        asked = {**ASKED, "n": 2, **({"timeout": SOON_S} if how == "field" else {})}
        async with asyncio.timeout(10):
            answer = await client.post("/v1/completions", json=asked, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (504, "deadline_exceeded", "timeout_error")
        assert answer.headers["x-should-retry"] == "false"
        if stack.engine.submits:  # a slow machine may pass the deadline before anything was asked for
            await stack.engine.heard(lambda: len(stack.engine.aborts) == len(stack.engine.submits))
        assert stack.llm.open_choices == 0


async def test_a_deadline_in_mid_stream_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    end_by, begun = Generation.end_by, list[Generation]()
    monkeypatch.setattr(Generation, "end_by", lambda generation, deadline, given_s: begun.append(generation))
    async with made() as (stack, client):
        stack.engine.script = lambda submit: tokens(submit, [65])
        asked = {**ASKED, "stream": True, "timeout": 60.0}
        asking = asyncio.create_task(client.post("/v1/completions", json=asked))
        await stack.engine.heard(lambda: stack.engine.submits)
        while stack.llm.waiting_choices:
            await asyncio.sleep(0)
        end_by(begun[0], asyncio.get_running_loop().time(), 60.0)  # the first token is here, and the time is over
        lines = (await asking).text.strip().split("\n\n")
        assert '"text":"A"' in lines[0] and '"code":"deadline_exceeded"' in lines[1] and lines[2] == "data: [DONE]"
        await stack.engine.heard(lambda: stack.engine.aborts)


async def test_the_time_of_a_request_counts_from_its_arrival_and_ends_with_it() -> None:
    clock = Clock()
    stack = Stack(scripted_config(max_request_s=100.0))
    await stack.new_engine()
    app = create_app(stack.llm, clock=clock)

    async def late(scope: Any, receive: Any, send: Any) -> None:
        async def slow() -> Any:
            clock.now += 101.0  # the body takes its time
            return await receive()

        await app(scope, slow if scope["headers"] and (b"x-late", b"1") in scope["headers"] else receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(late), base_url="http://test") as client:
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
        assert (await client.post("/v1/completions", json=ASKED, headers={"x-late": "1"})).status_code == 504
        assert len(stack.engine.submits) == 1
        longer = {**ASKED, "timeout": 1000.0}
        assert (await client.post("/v1/completions", json=longer, headers={"x-late": "1"})).status_code == 504
    await stack.close()


@pytest.mark.parametrize(
    ("fields", "headers", "status", "says"),
    [
        ({"timeout": 0}, {}, 400, "timeout"),
        ({"timeout": -1.5}, {}, 400, "timeout"),
        ({"timeout": "5"}, {}, 400, "timeout"),
        ({"timeout": 10**6}, {}, 400, "timeout"),
        ({"timeout": 60.0}, {}, 200, ""),
        ({}, {"X-Request-Deadline": "tomorrow"}, 400, "X-Request-Deadline"),
        ({}, {"X-Request-Deadline": "nan"}, 400, "X-Request-Deadline"),
        ({}, {"X-Request-Deadline": "1.5"}, 504, "over"),
        ({}, {"X-Request-Deadline": "9999999999"}, 200, ""),
        ({"logit_bias": {str(at): 1 for at in range(1025)}}, {}, 400, "logit_bias"),
        ({"stop_token_ids": [1] * 1025}, {}, 400, "stop_token_ids"),
        ({"prompt": "x" * 40}, {}, 400, "41 tokens, and this server takes 20"),
        ({"prompt": [["x"]]}, {}, 400, "prompt"),
        ({"prompt": ["x", "x" * 40], "echo": True, "max_tokens": 0}, {}, 400, "41 tokens"),
        ({"prompt": "x" * (CONTEXT + 1)}, {}, 400, "takes 20"),
    ],
)
async def test_limits_of_one_request(fields: dict[str, Any], headers: dict[str, str], status: int, says: str) -> None:
    async with made(max_prompt_tokens=20) as (_, client):
        answer = await client.post("/v1/completions", json={**ASKED, **fields}, headers=headers)
        assert answer.status_code == status, answer.text
        assert status == 200 or says in answer.json()["error"]["message"]
