"""The Prometheus page and the dashboard's state."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import MODEL, Stack, say, snapshot

from tokenspeed.messages.snapshot import STATES, HeadroomSnapshot, StorageSnapshot
from tokenspeed.server.anthropic import requests as anthropic_requests
from tokenspeed.server.anthropic.requests import CountTokensRequest, MessagesRequest
from tokenspeed.server.embeddings import RULES as EMBEDDING_RULES
from tokenspeed.server.embeddings import EmbeddingsRequest
from tokenspeed.server.fields import HARMLESS, REFUSED, WITHOUT_EFFECT, FieldRules
from tokenspeed.server.generate_api import requests as generate_requests
from tokenspeed.server.generate_api.requests import GenerateRequest
from tokenspeed.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokenspeed.server.responses_api import requests as responses_requests
from tokenspeed.server.responses_api.requests import ResponsesRequest
from tokenspeed.telemetry.metrics import METRIC_NAMES

DOORS = [
    ("Responses", (ResponsesRequest,), responses_requests.RULES),
    ("SGLang's generate", (GenerateRequest,), generate_requests.RULES),
    ("SGLang's generate", (), generate_requests.SAMPLING_RULES),
    ("Embeddings", (EmbeddingsRequest,), EMBEDDING_RULES),
    ("Anthropic's messages", (MessagesRequest, CountTokensRequest), anthropic_requests.RULES),
]
"""The doors with tables of their own: the heading of their section, their bodies, and what becomes of other fields."""

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"


async def heard_snapshot(stack: Stack, **changes: object) -> None:
    before = stack.llm.engine.snapshot
    await stack.engine.send_snapshot(snapshot(**changes))
    while stack.llm.engine.snapshot is before:
        await stack.llm.engine.changed()


async def values(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample of the page as name{labels} to value."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    result = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            result[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return result


async def test_names_are_the_documented_ones(stack: Stack, client: httpx.AsyncClient) -> None:
    """Known failure 37: dashboards stand on these names."""
    await heard_snapshot(
        stack,
        host=snapshot().groups,
        storage=StorageSnapshot(blocks=1, bytes=4096, limit_bytes=8192, pending=0),
        headroom=HeadroomSnapshot(tokens=64, largest=64, requests=1, typical_tokens=64),
    )
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "user": "u"})
    text = (await client.get("/metrics")).text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    ours = {name for name in names if "_process_" not in name}
    assert ours == set(METRIC_NAMES)
    page = API_PAGE.read_text()
    assert [name for name in METRIC_NAMES if f"`{name}`" not in page] == []


async def test_what_the_api_process_counts(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("abcd", each=2)
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "n": 2, "max_tokens": 4})
    await client.get("/nothing/here")
    await client.get("/v1/models/other")
    found = await values(client)
    assert found["tokenspeed_http_requests_total{method=POST,path=/v1/completions,status=200}"] == 1
    assert found["tokenspeed_http_requests_total{method=GET,path=none,status=404}"] == 1
    assert found["tokenspeed_http_requests_total{method=GET,path=/v1/models/{model:path},status=404}"] == 1
    assert found["tokenspeed_choices_started_total"] == 2
    assert found["tokenspeed_choices_finished_total{reason=length}"] == 2
    assert found["tokenspeed_prompt_tokens_total"] == 3
    assert found["tokenspeed_cached_prompt_tokens_total"] == 6
    assert found["tokenspeed_generation_tokens_total"] == 8
    assert found["tokenspeed_time_to_first_token_seconds_count"] == 2
    assert found["tokenspeed_inter_token_seconds_count"] == 2
    assert found["tokenspeed_choice_seconds_count"] == 2
    assert found["tokenspeed_open_choices"] == 0


async def test_what_the_engine_reports(stack: Stack, client: httpx.AsyncClient) -> None:
    found = await values(client)
    assert found["tokenspeed_engine_ready"] == 1 and "tokenspeed_requests_running" not in found
    await heard_snapshot(stack)
    found = await values(client)
    assert (found["tokenspeed_requests_running"], found["tokenspeed_requests_waiting"]) == (2, 1)
    assert found["tokenspeed_requests{state=Decoding}"] == STATES.index("Decoding")
    assert "tokenspeed_requests{state=Prefetching}" not in found, "what cannot be is not 0"
    assert found["tokenspeed_kv_blocks{group=full,kind=held}"] == 20
    assert found["tokenspeed_kv_block_bytes{group=full}"] == 4096
    assert found["tokenspeed_state_transitions_total{source=Submitted,target=Prefilling}"] == 4
    assert found["tokenspeed_step_seconds{part=device}"] == 0.002
    assert found["tokenspeed_engine_decode_tokens_total"] == 77
    stack.connection.engine_lost("gone")
    found = await values(client)
    assert (found["tokenspeed_engine_ready"], found["tokenspeed_engine_lost_total"]) == (0, 1)
    assert "tokenspeed_requests_running" not in found, "a dead engine's figures are not shown"


async def test_state(stack: Stack, client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/internal/state")).json()
    assert body["snapshot"] is None and body["age_s"] is None and body["phase"] == "ready"
    await heard_snapshot(stack)
    body = (await client.get("/v1/internal/state")).json()
    assert (body["model"], body["recipe"], body["profile"], body["recipe_hash"]) == (
        MODEL,
        "a-recipe",
        "smoke",
        "abc123",
    )
    assert (body["device"], body["devices"]) == ("cpu", 1) and body["ready"] is True and body["error"] == ""
    assert body["facts"]["kv_tokens"] == 4096
    assert 0 <= body["age_s"] < 60 and body["server_time"] > 1.7e9
    assert body["snapshot"]["states"]["Prefetching"] is None and body["snapshot"]["running"] == 2
    assert body["snapshot"]["flows"] == [["Submitted", "Prefilling", 4]]
    stack.connection.engine_lost("gone")
    body = (await client.get("/v1/internal/state")).json()
    assert (body["phase"], body["error"], body["snapshot"], body["lost"]) == ("restarting", "gone", None, 1)


async def test_the_vendor_is_what_the_engine_says_it_runs_on(stack: Stack, client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/internal/state")).json()
    assert (body["vendor"], body["device"]) == (None, "cpu")
    await stack.engine.send_status("ready", facts={"vendor": "amd"})
    async with asyncio.timeout(10):
        while (body := (await client.get("/v1/internal/state")).json())["vendor"] is None:
            await asyncio.sleep(0.01)
    assert body["vendor"] == "amd"


async def test_state_stream(stack: Stack, url: str) -> None:
    async with httpx.AsyncClient() as client, client.stream("GET", f"{url}/v1/internal/state/stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()

        async def event() -> Any:
            while not (line := await anext(lines)).startswith("data: "):
                pass
            return json.loads(line.removeprefix("data: "))

        assert (await event())["snapshot"] is None
        for running in range(1, 30):
            await heard_snapshot(stack, running=running)
        seen = (await event())["snapshot"]["running"]
        assert seen == 29, "what changed faster than four times a second is skipped"
        stack.connection.engine_lost("gone")
        assert (await event())["phase"] == "restarting"


async def test_state_stream_ends_with_the_server(stack: Stack, url: str) -> None:
    async with httpx.AsyncClient() as client, client.stream("GET", f"{url}/v1/internal/state/stream") as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await stack.llm.drain(grace_s=0)
        assert [line async for line in lines if line.startswith("data: ")] == []


def test_the_page_lists_every_field() -> None:
    page = API_PAGE.read_text()
    supported = {
        name
        for body in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
        for name in body.__struct_fields__
    }
    missing = [name for name in sorted(supported | set(WITHOUT_EFFECT) | set(REFUSED)) if f"`{name}`" not in page]
    assert missing == []
    assert set(HARMLESS) <= set(REFUSED)
    assert not (set(REFUSED) & set(WITHOUT_EFFECT)) and not (supported & set(WITHOUT_EFFECT))


@pytest.mark.parametrize(("heading", "bodies", "rules"), DOORS)
def test_the_page_lists_every_field_of_other_doors(
    heading: str, bodies: tuple[type[msgspec.Struct], ...], rules: FieldRules
) -> None:
    section = API_PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    supported = {name for body in bodies for name in body.__struct_fields__}
    known = supported | set(rules.without_effect) | set(rules.refused)
    known |= set(generate_requests.SAMPLING_NAMES) if rules is generate_requests.SAMPLING_RULES else set()
    assert [name for name in sorted(known) if f"`{name}`" not in section] == []
    assert set(rules.harmless) <= set(rules.refused)
    assert not set(rules.refused) & set(rules.without_effect)
    assert not supported & (set(rules.without_effect) | set(rules.refused))


async def test_the_page_lists_every_route(client: httpx.AsyncClient) -> None:
    page = API_PAGE.read_text()
    schema = (await client.get("/openapi.json")).json()
    paths = [path.replace("{model:path}", "{model}") for path in schema["paths"]]
    assert [path for path in paths if f"`{path}`" not in page] == []
    listed = schema["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [(one["name"], one["in"]) for one in listed] == [
        ("response_id", "path"),
        ("limit", "query"),
        ("order", "query"),
        ("after", "query"),
    ]
    for path, methods in schema["paths"].items():
        for method in methods.values():
            named = {one["name"] for one in method.get("parameters", []) if one["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)(?::\w+)?}", path)), path
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "$ref" not in json.dumps(body) and set(body["required"]) == {"model", "messages"}
