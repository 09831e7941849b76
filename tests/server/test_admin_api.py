"""The administration over a scripted engine: orders, aborts, what it tells, and whom it lets in."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_server import serving
from fastapi import FastAPI
from scripted_engine import CONTEXT, MODEL, VOCABULARY, Stack, scripted_config, snapshot, tokens

from tokenspeed.messages import Order
from tokenspeed.server.admin import create_admin_app
from tokenspeed.server.app import create_app

COMPLETION = {"model": MODEL, "prompt": "x"}


@pytest.fixture
async def admin(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_admin_app(app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client


def actions(stack: Stack) -> list[str]:
    return [order.action for order in stack.engine.orders]


async def test_flush(stack: Stack, admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/flush_cache")
    assert (answer.status_code, answer.text) == (200, "Cache flushed.\n")
    stack.engine.refusal = "3 requests run or wait"
    answer = await admin.post("/flush_cache", json={})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_idle"
    assert "3 requests run or wait" in answer.json()["error"]["message"]
    assert stack.engine.orders == [Order(1, "flush_cache"), Order(2, "flush_cache")]


async def test_a_flush_may_wait_for_requests_to_end(stack: Stack, admin: httpx.AsyncClient) -> None:
    stack.engine.refusal = "a request runs"
    flushing = asyncio.create_task(admin.post("/flush_cache", json={"timeout": 60}))
    await stack.engine.heard(lambda: len(stack.engine.orders) >= 2)
    stack.engine.refusal = ""
    assert (await flushing).status_code == 200


async def test_pause_in_place_and_continue(stack: Stack, client: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/pause_generation", json={"mode": "in_place"})
    assert answer.json() == {"message": "Generation paused successfully.", "status": "ok"}
    assert stack.llm.paused and (await admin.get("/get_server_info")).json()["paused"] is True
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200, "the script knows no pause"
    assert (await admin.post("/continue")).json()["status"] == "ok"
    assert not stack.llm.paused and actions(stack) == ["pause", "continue"]


async def test_a_pause_is_no_standstill(stack: Stack, client: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
    stack.engine.pause()
    waiting = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
    await stack.engine.heard(lambda: stack.engine.submits)
    await admin.post("/pause", json={"mode": "in_place"})
    assert stack.llm.open_choices == 1 and stack.llm.stalled_for == 0
    stack.engine.resume()
    assert (await waiting).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/pause_generation", None), ("/abort_request", {"abort_all": True})], ids=["pause", "abort"]
)
async def test_all_requests_are_aborted(
    stack: Stack, client: httpx.AsyncClient, admin: httpx.AsyncClient, path: str, body: Any
) -> None:
    stack.engine.pause()
    calls = [asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "n": 2})) for _ in range(2)]
    await stack.engine.heard(lambda: len(stack.engine.submits) == 4)
    assert (await admin.post(path, json=body) if body else await admin.post(path)).status_code == 200
    for call in calls:
        answer = await call
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
        assert answer.headers["x-should-retry"] == "false"
    await stack.engine.heard(lambda: len(stack.engine.aborts) == 4)
    assert stack.llm.open_choices == 0


async def test_one_request_is_aborted_in_mid_stream(stack: Stack, url: str, admin: httpx.AsyncClient) -> None:
    stack.engine.script = lambda submit: tokens(submit, [65])
    async with httpx.AsyncClient(base_url=url) as client:
        stay, go = [
            client.stream(
                "POST", "/v1/completions", json={**COMPLETION, "stream": True}, headers={"X-Request-Id": name}
            )
            for name in ("stay", "go")
        ]
        async with stay as staying, go as going:
            lines = [going.aiter_lines(), staying.aiter_lines()]
            assert all(["A" in await anext(line) for line in lines])
            assert (await admin.post("/abort_request", json={"rid": "go"})).json() == {"aborted_choices": 1}
            rest = [line async for line in lines[0] if line]
            assert len(rest) == 2 and '"code":"aborted"' in rest[0] and rest[1] == "data: [DONE]"
            assert "finish_reason" not in rest[0]
            assert stack.llm.open_choices == 1
    assert (await admin.post("/abort_request", json={"rid": "nobody"})).json() == {"aborted_choices": 0}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/abort_request", {}, 400, "abort_all"),
        ("/abort_request", {"rid": 7}, 400, "rid"),
        ("/pause", {"mode": "retract"}, 400, "in_place"),
        ("/pause", {"mode": "gently"}, 400, "mode"),
        ("/flush_cache", {"timeout": -1}, 400, "timeout"),
        ("/continue", {"mode": "abort"}, 400, "mode"),
        ("/get_server_info", {}, 405, "GET"),
        ("/v1/completions", COMPLETION, 404, "/v1/completions"),
    ],
)
async def test_what_is_refused(
    stack: Stack, admin: httpx.AsyncClient, path: str, body: Any, status: int, says: str
) -> None:
    answer = await admin.post(path, json=body)
    assert answer.status_code == status and says in answer.json()["error"]["message"]
    assert (await admin.get("/flush_cache")).status_code == 405
    assert stack.engine.orders == []


async def test_pages_in_a_browser_are_refused(stack: Stack, admin: httpx.AsyncClient) -> None:
    for path in ("/flush_cache", "/pause", "/continue", "/abort_request"):
        answer = await admin.post(path, headers={"Origin": "http://admin"})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "permission_denied"
    assert stack.engine.orders == []


async def test_an_engine_that_ends_answers_no_order(stack: Stack, admin: httpx.AsyncClient) -> None:
    await admin.post("/pause")
    stack.connection.order = lambda order: stack.connection.engine_lost("SIGKILL")  # type: ignore[method-assign]
    stack.llm._orders._send = stack.connection.order
    answer = await admin.post("/continue")
    assert answer.status_code == 503 and "SIGKILL" in answer.json()["error"]["message"]
    assert not stack.llm.paused, "another engine begins without a pause"
    assert (await admin.post("/flush_cache")).status_code == 503


async def test_drain_ends_a_pause(stack: Stack, client: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
    await admin.post("/pause", json={"mode": "in_place"})
    assert await stack.llm.drain(grace_s=0) == 0
    assert actions(stack) == ["pause", "continue"]


async def told_snapshots(stack: Stack, *states: dict[str, Any]) -> None:
    for changes in states:
        before = stack.llm.engine.snapshot
        await stack.engine.send_snapshot(snapshot(**changes))
        while stack.llm.engine.snapshot is before:
            await stack.llm.engine.changed()


@pytest.mark.parametrize("reader", ["client", "admin"])
async def test_what_is_told(stack: Stack, client: httpx.AsyncClient, admin: httpx.AsyncClient, reader: str) -> None:
    asked = {"client": client, "admin": admin}[reader]
    assert (await asked.get("/v1/loads")).status_code == 503
    counters = snapshot().counters
    await told_snapshots(
        stack,
        {"time": 10.0, "counters": type(counters)(decode_tokens=100)},
        {"time": 12.0, "counters": type(counters)(decode_tokens=150, prefix_query_tokens=40, prefix_hit_tokens=10)},
    )
    body = (await asked.get("/v1/loads")).json()
    assert body["timestamp"] == 12.0 and body["dp_rank_count"] == 1
    (load,) = body["loads"]
    assert load == {
        "dp_rank": 0,
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_total_reqs": 3,
        "num_used_tokens": 20 * 64,
        "max_total_num_tokens": 100 * 64,
        "token_usage": 0.2,
        "gen_throughput": 25.0,
        "cache_hit_rate": 0.25,
        "utilization": round(2 / 64, 4),
        "max_running_requests": 64,
        "paused": False,
    }
    assert body["aggregate"]["total_reqs"] == 3 and body["aggregate"]["avg_throughput"] == 25.0
    model = (await asked.get("/get_model_info")).json()
    assert model["is_generation"] is True and model["served_model_name"] == MODEL
    assert (model["max_model_len"], model["vocab_size"], model["model_type"]) == (CONTEXT, VOCABULARY, "llama")
    version = (await asked.get("/version")).json()
    assert version["recipe_hash"] == "abc123" and version["version"][0].isdigit()


async def test_server_info_blanks_secrets(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ops: of-the-operator admin\n")
    config = scripted_config(api_key_file=str(tmp_path / "keys"))
    settings = {"api.port": 8000, "env.HF_TOKEN": "hf_secretsecret", "served_name": "of-the-operator"}
    async with admin_of(Stack(config.model_copy(update={"settings": settings}))) as admin:
        body = (await admin.get("/get_server_info", headers={"x-api-key": "of-the-operator"})).json()
        assert (body["api.port"], body["env.HF_TOKEN"], body["served_name"]) == (8000, "***", "***")
        assert body["status"] == "ready" and body["internal_states"] == []


@contextlib.asynccontextmanager
async def admin_of(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    await stack.new_engine()
    async with (
        serving(create_admin_app(create_app(stack.llm))) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield client
    await stack.close()


async def test_where_keys_are_set_only_those_of_admins_open_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann: of-ann\nops: of-ops admin\n")
    stack = Stack(scripted_config(api_key_file=str(tmp_path / "keys")))
    async with admin_of(stack) as admin:

        async def statuses(key: str | None) -> list[int]:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            asked: list[Callable[..., Any]] = [admin.get, admin.post, admin.get]
            paths = ["/get_server_info", "/flush_cache", "/live"]
            return [(await ask(path, headers=headers)).status_code for ask, path in zip(asked, paths, strict=True)]

        assert await statuses(None) == [401, 401, 200]
        assert await statuses("of-ann") == [403, 403, 200]
        assert await statuses("of-ops") == [200, 200, 200]
        answer = await admin.get("/version", headers={"x-api-key": "of-ann"})
        assert answer.json()["error"]["type"] == "permission_error" and "'ann'" in answer.json()["error"]["message"]
        assert len(stack.engine.orders) == 1
