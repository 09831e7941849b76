"""Timings in answers and in histograms."""

import json
from typing import Any

import httpx
import pytest
from named_events import named_events
from scripted_engine import MODEL, Stack, say

from tokenspeed.frontend.timings import Timings

NAMES = [
    "queue_s",
    "time_to_first_token_s",
    "inter_token_s",
    "end_to_end_s",
    "prompt_tokens_per_s",
    "cached_tokens",
]


def test_the_parts_of_a_call() -> None:
    timings = Timings(100.0)
    assert (timings.first_token_s, timings.inter_token_s, timings.end_to_end_s) == (None, None, None)
    assert timings.prompt_tokens_per_s(5) is None
    timings.took(103.0, 1, 0.0, 1.0)  # the first choice
    timings.took(104.0, 1, 0.0, 0.5)  # the second one
    timings.took(105.0, 2, 103.0, -1.0)
    timings.took(105.0, 1, 104.0, -1.0)
    timings.ended_at = 106.5
    assert (timings.queue_s, timings.first_token_s, timings.end_to_end_s, timings.tokens) == (0.5, 3.0, 6.5, 5)
    assert timings.inter_token_s == pytest.approx((2.0 + 1.0) / 3)
    assert timings.prompt_tokens_per_s(50) == pytest.approx(20.0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("how", ["field", "header"])
async def test_timings_in_the_answer(stack: Stack, client: httpx.AsyncClient, path: str, how: str) -> None:
    stack.engine.script = say("abcd")
    what: dict[str, Any] = (
        {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    headers = {"X-Request-Timings": "1"} if how == "header" else {}
    asked = {"model": MODEL, **what, **({"return_timings": True} if how == "field" else {})}
    body = (await client.post(path, json=asked, headers=headers)).json()
    check(body["timings"])
    text = (await client.post(path, json={**asked, "stream": True}, headers=headers)).text
    *events, last, done = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert done == "[DONE]" and not any("timings" in one for one in events)
    chunk = json.loads(last)
    assert chunk["choices"] == [] and "usage" not in chunk and chunk["model"] == MODEL
    check(chunk["timings"])
    both = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    chunk = json.loads((await client.post(path, json=both, headers=headers)).text.strip().split("\n\n")[-2][6:])
    assert chunk["usage"]["completion_tokens"] == 5 and list(chunk["timings"]) == NAMES


@pytest.mark.parametrize("how", ["field", "header"])
async def test_timings_at_the_other_doors(stack: Stack, client: httpx.AsyncClient, how: str) -> None:
    stack.engine.script = say("abcd")
    headers = {"X-Request-Timings": "1"} if how == "header" else {}
    field = {"return_timings": True} if how == "field" else {}

    async def ask(path: str, **body: Any) -> httpx.Response:
        return await client.post(path, json={**body, **field}, headers=headers)

    message = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    check((await ask("/v1/messages", **message)).json()["timings"])
    *before, last, stop = named_events((await ask("/v1/messages", **message, stream=True)).text)
    assert stop == {"type": "message_stop"} and "timings" not in json.dumps(before)
    assert last["usage"]["output_tokens"] == 5
    check(last["timings"])

    asked = {"model": MODEL, "input": "x"}
    response = (await ask("/v1/responses", **asked)).json()
    check(response["timings"])
    kept = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert kept["timings"] == response["timings"]
    *before, last = named_events((await ask("/v1/responses", **asked, stream=True)).text, ends_with_done=True)
    assert last["type"] == "response.completed" and "timings" not in json.dumps(before)
    check(last["response"]["timings"])

    check((await ask("/generate", text="abc")).json()["meta_info"]["timings"])
    two: list[Any] = (await ask("/generate", text=["abc", "abd"])).json()
    assert two[0]["meta_info"]["timings"] == two[1]["meta_info"]["timings"]
    text = (await ask("/generate", text="abc", stream=True)).text
    *rest, end, done = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert done == "[DONE]" and not any("timings" in one for one in rest)
    check(json.loads(end)["meta_info"]["timings"])


def check(timings: dict[str, Any]) -> None:
    assert list(timings) == NAMES
    assert timings["queue_s"] == 0.0 and timings["cached_tokens"] == 3
    assert 0 <= timings["time_to_first_token_s"] <= timings["end_to_end_s"]
    assert timings["inter_token_s"] >= 0 and timings["prompt_tokens_per_s"] > 0


async def test_nobody_gets_timings_unasked(client: httpx.AsyncClient) -> None:
    asked = {"model": MODEL, "prompt": "x"}
    assert "timings" not in (await client.post("/v1/completions", json=asked)).json()
    headers = {"X-Request-Timings": "0"}
    answer = await client.post("/v1/completions", json={**asked, "stream": True}, headers=headers)
    assert "timings" not in answer.text


async def test_nobody_gets_timings_unasked_at_the_other_doors(client: httpx.AsyncClient) -> None:
    for path, asked in (
        ("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"model": MODEL, "input": "x"}),
        ("/generate", {"text": "x"}),
    ):
        for stream in (False, True):
            answer = await client.post(path, json={**asked, "stream": stream})
            assert answer.status_code == 200 and "timings" not in answer.text


async def test_histograms(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("abcd")
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 99, "n": 2})
    page = (await client.get("/metrics")).text
    for line in (
        "tokenspeed_queue_seconds_count 2.0",
        "tokenspeed_prompt_length_tokens_sum 100.0",
        "tokenspeed_prompt_length_tokens_count 1.0",
        "tokenspeed_cached_length_tokens_sum 6.0",
        "tokenspeed_output_length_tokens_sum 10.0",
        "tokenspeed_output_length_tokens_count 2.0",
        'tokenspeed_prompt_length_tokens_bucket{le="64.0"} 0.0',
    ):
        assert line in page.splitlines(), line
