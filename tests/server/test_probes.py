"""/live, /ready and /progress tell the truth, each about its own question."""

import time

import httpx
import pytest
from scripted_engine import MODEL, Stack, say, snapshot

from tokenspeed.frontend.request import GenerationRequest
from tokenspeed.messages.snapshot import StepSnapshot
from tokenspeed.server.app import PROGRESS_THRESHOLD_S


async def statuses(client: httpx.AsyncClient) -> tuple[int, int, int]:
    """Of /live, /ready and /progress."""
    live, ready, progress = [(await client.get(path)).status_code for path in ("/live", "/ready", "/progress")]
    return live, ready, progress


async def test_all_is_well(client: httpx.AsyncClient) -> None:
    assert await statuses(client) == (200, 200, 200)
    assert (await client.get("/ready")).json() == {"status": "ready", "model": MODEL}
    assert (await client.get("/progress")).json()["status"] == "idle"


async def test_starting_shows_the_phase(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 34: ready before warm is 503 with the phase."""
    engine = await stack.new_engine(ready=False)
    await engine.send_status("load", done=3, total=10, detail="shard 3")
    while stack.llm.engine.phase != "load":
        await stack.llm.engine.changed()
    answer = await client.get("/ready")
    assert answer.status_code == 503
    body = answer.json()
    assert (body["phase"], body["done"], body["total"], body["detail"]) == ("load", 3, 10, "shard 3")
    later = time.monotonic() + 10 * PROGRESS_THRESHOLD_S
    monkeypatch.setattr("tokenspeed.frontend.engine_state.time.monotonic", lambda: later)
    assert await statuses(client) == (200, 503, 200), "an engine that loads for long is silent, and alive"


async def test_a_lost_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    """Known failure 34: 503 with the cause at once; live until it is given up."""
    stack.connection.engine_lost("killed by SIGKILL")
    answer = await client.get("/ready")
    assert answer.status_code == 503 and answer.json()["phase"] == "restarting"
    assert answer.json()["error"] == "killed by SIGKILL"
    assert await statuses(client) == (200, 503, 200)
    stack.connection.engine_given_up("killed by SIGKILL")
    assert await statuses(client) == (503, 503, 200)
    assert "SIGKILL" in (await client.get("/live")).text


async def test_an_engine_that_comes_back(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.connection.engine_lost("killed by SIGKILL")
    await stack.new_engine()
    assert await statuses(client) == (200, 200, 200)


async def test_draining_is_not_ready(stack: Stack, client: httpx.AsyncClient) -> None:
    await stack.llm.drain(grace_s=0)
    assert await statuses(client) == (200, 503, 200)
    assert (await client.get("/ready")).json()["phase"] == "draining"


async def test_work_that_does_not_move(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("tokenspeed.frontend.engine_state.time.monotonic", lambda: now)
    now += 10 * PROGRESS_THRESHOLD_S  # idle for long: nothing is stuck, and the work that comes now is new
    stack.engine.pause()
    generation = await stack.llm.start([GenerationRequest(prompt="x")])
    await stack.engine.heard(lambda: stack.engine.submits)
    assert await statuses(client) == (503, 200, 200), "the loop was silent all the time, which is for /live to say"
    now += PROGRESS_THRESHOLD_S - 1
    assert (await client.get("/progress")).json()["status"] == "moving"
    now += 2
    answer = await client.get("/progress")
    assert answer.status_code == 503 and "1 requests are open" in answer.json()["error"]
    stack.engine.resume()
    while await generation.next_batch():
        pass
    assert await statuses(client) == (200, 200, 200)


async def test_patience_grows_with_the_steps(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("tokenspeed.frontend.engine_state.time.monotonic", lambda: now)
    slow = StepSnapshot(plan_ms=0, device_ms=30_000, commit_ms=0, bubble_ms=0)
    await stack.engine.send_snapshot(snapshot(step=slow))
    while stack.llm.engine.snapshot is None:
        await stack.llm.engine.changed()
    stack.engine.pause()
    generation = await stack.llm.start([GenerationRequest(prompt="x")])
    now += 2 * PROGRESS_THRESHOLD_S
    assert (await client.get("/progress")).status_code == 200
    now += 2 * PROGRESS_THRESHOLD_S
    assert (await client.get("/progress")).status_code == 503
    stack.engine.script = say("x")
    generation.cancel()
    assert (await client.get("/progress")).status_code == 200, "nobody waits any more"


async def test_a_snapshot_with_a_newer_step_is_progress(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("tokenspeed.frontend.engine_state.time.monotonic", lambda: now)
    stack.engine.pause()
    await stack.llm.start([GenerationRequest(prompt="x")])
    for last_progress, expected in ((1.0, 200), (1.0, 503), (2.0, 200)):
        now += PROGRESS_THRESHOLD_S + 1
        before = stack.llm.engine.snapshot
        await stack.engine.send_snapshot(snapshot(last_progress=last_progress))
        while stack.llm.engine.snapshot is before:
            await stack.llm.engine.changed()
        assert (await client.get("/progress")).status_code == expected
