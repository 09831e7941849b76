"""Which responses are kept, for whom, and how many."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from named_events import named_events
from scripted_engine import MODEL, Stack, scripted_config

from tokenspeed.server.app import create_app
from tokenspeed.server.keys import LOOK_AGAIN_S
from tokenspeed.server.responses_api.store import ResponseStore, StoredResponse

ASKED: dict[str, Any] = {"model": MODEL, "input": "Hi"}
ANN, BOB = {"x-api-key": "of-ann"}, {"Authorization": "Bearer of-bob"}


@contextlib.asynccontextmanager
async def served(clock: Callable[[], float] = time.monotonic, **api: Any) -> AsyncIterator[httpx.AsyncClient]:
    stack = Stack(scripted_config(**api))
    try:
        await stack.new_engine()
        transport = httpx.ASGITransport(create_app(stack.llm, clock=clock), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        await stack.close()


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/responses", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        return named_events(answer.text, ends_with_done=True)[-1]["response"]
    return answer.json()


async def status(client: httpx.AsyncClient, response: dict[str, Any]) -> int:
    return (await client.get(f"/v1/responses/{response['id']}")).status_code


def stored(size: int, owner: str = "ann") -> StoredResponse:
    return StoredResponse(b"r" * size, b"", b"", owner)


def test_bounds_of_count_and_bytes() -> None:
    store = ResponseStore(most=3, most_bytes=100)
    for name in "abcd":
        store.put(name, stored(10))
    assert [name for name in "abcd" if store.get(name, "ann")] == ["b", "c", "d"] and store.bytes == 30
    store.put("big", stored(85))
    assert [name for name in ("b", "c", "d", "big") if store.get(name, "ann")] == ["d", "big"] and store.bytes == 95
    store.put("too big", stored(101))
    assert store.get("too big", "ann") is None and len(store) == 2
    assert not store.delete("big", "bob") and store.bytes == 95
    assert store.delete("big", "ann") and not store.delete("big", "ann") and (store.bytes, len(store)) == (10, 1)


@pytest.mark.parametrize("bounds", [(0, 100), (3, 0)])
def test_a_store_that_is_off(bounds: tuple[int, int]) -> None:
    store = ResponseStore(*bounds)
    store.put("a", stored(0))
    assert not store.is_on and len(store) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_there_for_its_own_key_only(tmp_path: Path, stream: bool) -> None:
    (tmp_path / "keys").write_text("ann: of-ann\nbob: of-bob\n")
    async with served(api_key_file=str(tmp_path / "keys")) as client:
        client.headers.update(ANN)
        path = f"/v1/responses/{(await ask(client, stream=stream))['id']}"
        for method, of_what in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
            missing = await client.request(method, of_what, headers=BOB | {"x-api-key": ""})
            assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
        goes_on = {**ASKED, "previous_response_id": path.rpartition("/")[2]}
        refused = await client.post("/v1/responses", json=goes_on, headers=BOB | {"x-api-key": ""})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
        never = await client.get("/v1/responses/resp_none")
        assert (
            never.json()["error"]["message"].partition(":")[2] == missing.json()["error"]["message"].partition(":")[2]
        )

        assert (await client.get(path)).status_code == (await client.get(f"{path}/input_items")).status_code == 200
        assert (await client.post("/v1/responses", json=goes_on)).status_code == 200
        assert (await client.delete(path)).status_code == 200


async def test_a_key_that_is_rotated_keeps_its_responses(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann: of-ann\n")
    now = [100.0]
    async with served(clock=lambda: now[0], api_key_file=str(tmp_path / "keys")) as client:
        client.headers.update(ANN)
        response = await ask(client)
        (tmp_path / "new").write_text("ann: of-ann-anew\n")
        (tmp_path / "new").rename(tmp_path / "keys")
        now[0] += LOOK_AGAIN_S
        assert await status(client, response) == 401
        client.headers["x-api-key"] = "of-ann-anew"
        assert await status(client, response) == 200


async def test_the_configuration_bounds_it() -> None:
    async with served(response_store_count=2) as client:
        responses = [await ask(client) for _ in range(3)]
        assert [await status(client, response) for response in responses] == [404, 200, 200]
    async with served(response_store_bytes=3000) as client:
        small, large = await ask(client), await ask(client, metadata={str(at): "a" * 500 for at in range(6)})
        assert [await status(client, response) for response in (small, large)] == [200, 404]


@pytest.mark.parametrize("bound", ["response_store_count", "response_store_bytes"])
async def test_it_may_be_off(bound: str) -> None:
    async with served(**{bound: 0}) as client:
        for response in (await ask(client), await ask(client, store=False), await ask(client, stream=True)):
            assert response["store"] is False and await status(client, response) == 404
        refused = await client.post("/v1/responses", json={**ASKED, "store": True})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "store", "unsupported_field")
        assert f"api.{bound}" in error["message"]
