"""Looking at a server: snapshots are complete because somebody asked, a request tells its life, what happened stays."""

import asyncio
import json
from pathlib import Path

import httpx
import msgspec
import pytest
from scripted_engine import MODEL, Stack, say, scripted_config, snapshot

from tokenspeed.frontend import looking
from tokenspeed.messages.snapshot import EventSnapshot, RequestDetail, RequestSnapshot, StateSnapshot, TimelineEntry
from tokenspeed.server.app import create_app

DETAIL = RequestDetail(
    handle=7,
    request_id="call/0",
    state="Submitted",
    age_rounds=3,
    priority=0,
    prompt_tokens=40,
    computed_tokens=0,
    generated_tokens=0,
    cached_tokens=0,
    blocks=0,
    retractions=0,
    reason="capacity: short by 3 blocks",
    age_s=1.5,
    arrived=100.0,
    output_limit=16,
    time=101.5,
    timeline=[TimelineEntry(state="Submitted", time=100.0, round=9)],
    explain=["capacity: short by 3 blocks", "place 1 of 2 in the line"],
)
ROW = RequestSnapshot(**{name: getattr(DETAIL, name) for name in RequestSnapshot.__struct_fields__})


def event(sequence: int, text: str) -> EventSnapshot:
    return EventSnapshot(sequence=sequence, time=100.0 + sequence, kind="retraction", request_id="r", text=text)


async def state(client: httpx.AsyncClient) -> dict:
    return dict((await client.get("/v1/internal/state")).json())


async def heard(stack: Stack, told: StateSnapshot) -> None:
    count = stack.llm.engine.snapshots
    await stack.engine.send_snapshot(told)
    while stack.llm.engine.snapshots == count:
        await stack.llm.engine.changed()


# One request.


async def test_a_request_is_told_by_its_id_or_handle(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.details = {"call/0": DETAIL, "7": DETAIL}
    for name in ("call/0", "7"):
        answer = await client.get(f"/v1/internal/requests/{name}")
        assert answer.status_code == 200
        assert msgspec.json.decode(answer.content, type=RequestDetail) == DETAIL
    assert [inspect.name for inspect in stack.engine.inspects] == ["call/0", "7"]


async def test_the_id_of_an_answer_names_the_request(stack: Stack, client: httpx.AsyncClient) -> None:
    detail = msgspec.structs.replace(DETAIL, request_id="546c85f0")
    stack.engine.details = {"546c85f0": detail}
    for name in ("chatcmpl-546c85f0", "resp_546c85f0"):
        answer = await client.get(f"/v1/internal/requests/{name}")
        assert msgspec.json.decode(answer.content, type=RequestDetail) == detail


async def test_an_unknown_request_is_a_404_that_says_what_there_is(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/internal/requests/nobody")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (
        error["code"] == "request_not_found"
        and "'nobody'" in error["message"]
        and "/v1/internal/state" in error["message"]
    )


async def test_a_busy_engine_is_answered_for_with_what_was_known(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "ANSWER_S", 0.01)
    await heard(stack, snapshot(requests=[ROW]))
    stack.engine.is_busy = True
    told = (await client.get("/v1/internal/requests/7")).json()
    assert told["reason"] == ROW.reason and told["timeline"] == []
    assert "the engine's loop has said nothing for" in told["explain"][0] and told["explain"][1] == ROW.reason
    assert (await client.get("/v1/internal/requests/nobody")).status_code == 404


async def test_without_an_engine_there_is_no_answer(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.is_busy = True
    asked = asyncio.create_task(client.get("/v1/internal/requests/7"))
    await stack.engine.heard(lambda: stack.engine.inspects)
    stack.connection.engine_lost("gone")
    assert (await asked).status_code == 503
    assert (await client.get("/v1/internal/requests/7")).status_code == 503


async def test_it_wants_the_key_where_keys_are_set(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("someone: secret-key-1\n")
    stack = Stack(scripted_config(api_key_file=str(keys)))
    await stack.new_engine()
    stack.engine.details = {"7": DETAIL}
    transport = httpx.ASGITransport(create_app(stack.llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/v1/internal/requests/7")).status_code == 401
        allowed = await client.get("/v1/internal/requests/7", headers={"Authorization": "Bearer secret-key-1"})
        assert allowed.json()["handle"] == 7
    await stack.close()


# Looking.


async def test_a_look_has_the_engine_send_everything(stack: Stack, client: httpx.AsyncClient) -> None:
    await heard(stack, snapshot(complete=False))
    stack.engine.state = snapshot(requests=[ROW])
    told = await state(client)
    assert told["snapshot"]["complete"] and told["snapshot"]["requests"][0]["request_id"] == "call/0"
    assert stack.engine.watched == [looking.WATCH_S]
    await state(client)
    assert stack.engine.watched == [looking.WATCH_S], "what is fresh is not asked for again"


async def test_a_lease_is_renewed_before_it_ends(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.engine.state = snapshot()
    monkeypatch.setattr(looking, "WATCH_S", 1000.0)
    await state(client)
    monkeypatch.setattr(looking, "WATCH_S", 3000.0)
    await state(client)
    await stack.engine.heard(lambda: stack.engine.watched == [1000.0, 3000.0])


async def test_an_engine_in_a_long_step_holds_up_nobody(
    stack: Stack, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "PATIENCE_S", 0.01)
    await heard(stack, snapshot(complete=False, running=5))
    told = await state(client)
    assert told["snapshot"]["running"] == 5 and not told["snapshot"]["complete"]


async def test_the_stream_looks_as_well(stack: Stack, url: str) -> None:
    stack.engine.state = snapshot(requests=[ROW])
    async with httpx.AsyncClient(base_url=url) as client, client.stream("GET", "/v1/internal/state/stream") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                assert json.loads(line[6:])["snapshot"]["requests"][0]["handle"] == 7
                break
    assert stack.engine.watched == [looking.WATCH_S]


async def test_the_admin_port_tells_the_same(stack: Stack) -> None:
    from tokenspeed.server.admin import create_admin_app

    stack.engine.details = {"7": DETAIL}
    transport = httpx.ASGITransport(create_admin_app(create_app(stack.llm)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/v1/internal/requests/7")).json()["handle"] == 7


# What happened.


async def test_events_are_numbered_on_over_a_restart(stack: Stack, client: httpx.AsyncClient) -> None:
    await heard(stack, snapshot(events=[event(1, "one"), event(2, "two")]))
    assert [(one["sequence"], one["text"]) for one in (await state(client))["snapshot"]["events"]] == [
        (1, "one"),
        (2, "two"),
    ]
    stack.connection.engine_lost("killed by somebody")
    told = await state(client)
    assert told["progress"]["name"] == "restarting" and told["snapshot"] is None
    await stack.new_engine()
    await heard(stack, snapshot(events=[event(1, "three")]))
    told = (await state(client))["snapshot"]
    assert [one["sequence"] for one in told["events"]] == [1, 2, 3, 4, 5]
    assert [one["kind"] for one in told["events"]] == ["retraction", "retraction", "restart", "restart", "retraction"]
    assert "killed by somebody" in told["events"][2]["text"] and told["events"][4]["text"] == "three"
    assert told["restarts"] == 1 and told["phase"]["name"] == "ready"


async def test_the_log_keeps_the_newest_sixty_four(stack: Stack, client: httpx.AsyncClient) -> None:
    for first in (1, 51):
        await heard(stack, snapshot(events=[event(at, str(at)) for at in range(first, first + 50)]))
    told = (await state(client))["snapshot"]["events"]
    assert [one["text"] for one in told] == [str(at) for at in range(37, 101)]
    page = (await client.get("/metrics")).text
    assert 'tokenspeed_events_total{kind="retraction"} 100.0' in page


async def test_nothing_moving_is_an_event_once(stack: Stack) -> None:
    app = create_app(stack.llm, progress_threshold_s=0.0)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    stack.engine.pause()
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        asked = asyncio.create_task(client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}))
        await stack.engine.heard(lambda: stack.engine.submits)
        still = {"step": snapshot().step.__class__(plan_ms=0, device_ms=0, commit_ms=0, bubble_ms=0)}
        moved = snapshot(**still)
        await heard(stack, moved)
        await heard(stack, moved)
        for _ in range(2):
            told = (await state(client))["snapshot"]["events"]
        assert [one["kind"] for one in told] == ["stuck"]
        assert "1 requests are open" in told[0]["text"]
        stack.engine.resume()
        await asked


async def test_a_key_that_asks_too_much_and_a_reader_that_takes_too_little_are_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("crowd: secret-key-1 rpm=1\n")
    stack = Stack(scripted_config(api_key_file=str(keys)))
    await stack.new_engine()
    app = create_app(stack.llm)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer secret-key-1"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        statuses = [
            (await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).status_code for _ in range(5)
        ]
        assert statuses == [200, 429, 429, 429, 429]
        app.state.context.metrics.stream_cut("stalled")
        await heard(stack, snapshot())
        told = (await state(client))["snapshot"]["events"]
    await stack.close()
    assert [one["kind"] for one in told] == ["refused", "slow_reader"], "what repeats within seconds is told once"
    assert "'crowd'" in told[0]["text"] and "api.requests_per_minute, or rpm=N" in told[0]["text"]
    assert "api.slow_reader_s" in told[1]["text"]


async def test_how_long_clients_waited_is_told(stack: Stack, client: httpx.AsyncClient) -> None:
    await heard(stack, snapshot())
    before = (await state(client))["snapshot"]["latency"]
    assert before == {
        "requests": 0,
        "ttft_ms": None,
        "inter_token_ms": None,
        "end_to_end_ms": None,
        "queue_ms": None,
    }
    stack.engine.script = say("abcd")
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 4})
    latency = (await state(client))["snapshot"]["latency"]
    assert latency["requests"] == 1
    assert 0 < latency["ttft_ms"]["p50"] <= latency["end_to_end_ms"]["p50"]
    assert latency["inter_token_ms"]["p99"] >= latency["inter_token_ms"]["p50"] > 0


async def test_a_deadline_goes_with_its_request(stack: Stack, client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "timeout": 30})
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})
    first, second = stack.engine.submits
    now = (await state(client))["server_time"]
    assert now < first.deadline < now + 31 and second.deadline == 0
