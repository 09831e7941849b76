"""Keys: their files, who is let in, how much each may ask, and what logs and metrics say of them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from scripted_engine import MODEL, Stack, scripted_config

from tokenspeed.server.app import create_app
from tokenspeed.server.keys import LOOK_AGAIN_S, KeyRing
from tokenspeed.server.rates import Allowances
from tokenspeed.telemetry.api_keys import KEYS_VARIABLE, ApiKey, ApiKeyError, parse_keys
from tokenspeed.telemetry.metrics import MAX_KEY_NAMES, EngineReading, Metrics
from tokenspeed.telemetry.redaction import known_secrets

COMPLETION = {"model": MODEL, "prompt": "x"}


@dataclass
class Clock:
    """Stands still until a test moves it."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Served:
    """A server in process whose keys and clocks a test holds."""

    stack: Stack
    client: httpx.AsyncClient
    clock: Clock = field(default_factory=Clock)

    async def complete(self, key: str | None, **body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.client.post("/v1/completions", json={**COMPLETION, **body}, headers=headers)


@contextlib.asynccontextmanager
async def served(**api: object) -> AsyncIterator[Served]:
    clock = Clock()
    stack = Stack(scripted_config(**api))
    await stack.new_engine()
    try:
        transport = httpx.ASGITransport(create_app(stack.llm, clock=clock), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Served(stack, client, clock)
    finally:
        await stack.close()


def key_file(folder: Path, text: str) -> str:
    path = folder / "keys"
    path.write_text(text)
    return str(path)


def test_what_an_entry_may_be() -> None:
    keys = parse_keys(
        "# ours\n\nbare\nann: of-ann\nbob of-bob rpm=60\n  carol:  c:d concurrent=2 admin\nlast rpm=0", "f"
    )
    assert keys == [
        ApiKey("key-1", "bare"),
        ApiKey("ann", "of-ann"),
        ApiKey("bob", "of-bob", rpm=60),
        ApiKey("carol", "c:d", concurrent=2, admin=True),
        ApiKey("key-5", "last", rpm=0),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: one\na: two", "the same name"),
        ("a: one\nb: one", "the same key"),
        ("a: one rpm=many", "line 1: what stands behind the key"),
        ("# x\na: one two", "line 2: what stands behind the key"),
        ("a: one rpm=-1", "what stands behind"),
        ("ä: one", "a name is"),
    ],
)
def test_what_is_no_entry_is_refused_without_showing_it(text: str, says: str) -> None:
    with pytest.raises(ApiKeyError, match=says) as raised:
        parse_keys(text, "the file")
    assert "the file" in str(raised.value) and "one" not in str(raised.value)


async def test_both_headers_and_both_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "dora: of-dora, of-env")
    async with served(api_key_file=key_file(tmp_path, "ann: of-ann")) as server:
        for key in ("of-ann", "of-dora", "of-env"):
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert (await server.client.get("/v1/models", headers=headers)).status_code == 200
        both = {"Authorization": "Bearer wrong", "x-api-key": "of-ann"}
        assert (await server.client.get("/v1/models", headers=both)).status_code == 200
        for headers in ({}, {"x-api-key": "ann: of-ann"}, {"Authorization": "Bearer "}, {"x-api-key": ""}):
            answer = await server.client.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        page = (await server.client.get("/metrics", headers={"x-api-key": "of-dora"})).text
        assert 'tokenspeed_key_requests_total{key="env-2",status="200"} 2.0' in page
        assert 'tokenspeed_requests_refused_total{reason="invalid_api_key"} 4.0' in page
        assert "of-ann" not in page and "of-dora" not in page
    assert {"of-ann", "of-dora", "of-env"} <= known_secrets(str(tmp_path / "keys"))


def test_a_variable_without_a_key_stops_the_start() -> None:
    with pytest.raises(ApiKeyError, match=KEYS_VARIABLE):
        KeyRing(environment={KEYS_VARIABLE: " , "})
    assert not KeyRing(environment={}).required


async def test_a_rotated_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenspeed.server.keys")
    async with served(api_key_file=key_file(tmp_path, "ann: first-key")) as server:

        async def status(key: str) -> int:
            server.clock.now += LOOK_AGAIN_S
            return (await server.client.get("/v1/models", headers={"x-api-key": key})).status_code

        assert await status("first-key") == 200
        (tmp_path / "new").write_text("ann: second-key\n")
        (tmp_path / "new").rename(tmp_path / "keys")
        assert await status("first-key") == 401
        assert await status("second-key") == 200
        for broken in ("", "ann: second-key nonsense"):
            key_file(tmp_path, broken)
            assert await status("second-key") == 200, "a file that cannot be used locks nobody out"
        (tmp_path / "keys").unlink()
        assert await status("second-key") == 200
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "read the API keys again: ann" and sum("stay as they were" in line for line in told) == 3
    assert not any("second-key" in line for line in told)


async def test_requests_a_minute(tmp_path: Path) -> None:
    keys = key_file(tmp_path, "ann: of-ann\nbob: of-bob rpm=2\nops: of-ops rpm=0")
    async with served(api_key_file=keys, requests_per_minute=60) as server:
        left = []
        for _ in range(60):
            answer = await server.complete("of-ann")
            assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-requests"] == "60"
            left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        assert left == list(range(59, -1, -1)) and answer.headers["x-ratelimit-reset-requests"] == "60.000s"
        answer = await server.complete("of-ann")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1" and answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert "ann" in error["message"] and "of-ann" not in error["message"]
        assert (await server.client.get("/v1/models", headers={"x-api-key": "of-ann"})).status_code == 200
        server.clock.now += 1.0
        assert (await server.complete("of-ann")).status_code == 200
        assert [(await server.complete("of-bob")).status_code for _ in range(3)] == [200, 200, 429]
        assert (await server.complete("of-bob")).headers["retry-after"] == "30"
        for _ in range(70):
            answer = await server.complete("of-ops")
            assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers


async def test_requests_at_a_time(tmp_path: Path) -> None:
    async with served(api_key_file=key_file(tmp_path, "ann: of-ann\nbob: of-bob"), max_concurrent=2) as server:
        engine = server.stack.engine
        engine.pause()
        async with asyncio.TaskGroup() as group:
            statuses: list[int] = []

            async def one() -> None:
                statuses.append((await server.complete("of-ann")).status_code)

            group.create_task(one())
            group.create_task(one())
            await engine.heard(lambda: len(engine.submits) == 2)
            refused = await server.complete("of-ann")
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "concurrency_limit_exceeded"
            assert refused.headers["retry-after"] == "1"
            group.create_task(server.complete("of-bob"))
            await engine.heard(lambda: len(engine.submits) == 3)
            engine.resume()
        assert statuses == [200, 200]
        assert (await server.complete("of-ann")).status_code == 200
        assert (await server.complete("of-ann", temperature="hot")).status_code == 400
        assert (await server.complete("of-ann")).status_code == 200, "errors give their place back"


async def test_bounds_hold_for_a_server_without_keys() -> None:
    async with served(requests_per_minute=1) as server:
        assert [(await server.complete(None)).status_code for _ in range(2)] == [200, 429]
        assert (await server.client.get("/v1/models")).status_code == 200


def test_a_key_whose_bound_changes_begins_anew_and_one_without_is_forgotten() -> None:
    allowances = Allowances(0, 0, Clock())
    assert allowances.enter(ApiKey("a", "k", rpm=1)) is None and allowances.enter(ApiKey("a", "k", rpm=1)) is not None
    assert allowances.enter(ApiKey("a", "k", rpm=2)) is None
    assert allowances.enter(ApiKey("a", "k")) is None and allowances.headers(ApiKey("a", "k")) == {}


def test_names_of_keys_are_bounded_in_metrics() -> None:
    def reading() -> EngineReading:
        return EngineReading(
            ready=True, lost=0, open_choices=0, snapshot=None, snapshot_age=None, doubtful_operations=()
        )

    metrics = Metrics(reading)
    for number in range(MAX_KEY_NAMES + 7):
        metrics.key_request(f"name-{number}", 200)
    metrics.key_request("name-0", 200)
    page = metrics.page()[0].decode()
    assert page.count("tokenspeed_key_requests_total{") == MAX_KEY_NAMES + 1
    assert 'tokenspeed_key_requests_total{key="other",status="200"} 7.0' in page
    assert 'tokenspeed_key_requests_total{key="name-0",status="200"} 2.0' in page


async def test_the_log_has_the_name_and_not_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tokenspeed")
    async with served(api_key_file=key_file(tmp_path, "ann: secret-of-ann")) as server:
        await server.complete("secret-of-ann")
        await server.complete("wrong-secret")
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "POST /v1/completions 200 by ann" in told and "401 by an unknown key" in told
    assert "secret-of-ann" not in told and "wrong-secret" not in told
