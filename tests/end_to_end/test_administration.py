"""The administration over the real engine: a pause changes no token, a flush forgets, who leaves frees all."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, until

LONG = {"model": "smollm2-135m", "prompt": "Tell me a long story.", "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def administered(smollm2: Path) -> Iterator[tuple[RunningServer, httpx.Client]]:
    with (
        RunningServer("smollm2-135m", "--max-model-len", "2048", "--admin-port", "0", "--overlap-depth", "1") as server,
        httpx.Client(base_url=server.admin, timeout=60) as admin,
    ):
        yield server, admin


def cached_tokens(server: RunningServer, prompt: str) -> int:
    answer = server.client.post("/v1/completions", json={**LONG, "prompt": prompt, "max_tokens": 1}).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def held_blocks(state: dict[str, Any]) -> int:
    return sum(group["held"] for group in state["snapshot"]["groups"])


def test_a_pause_in_place_changes_no_token(administered: tuple[RunningServer, httpx.Client]) -> None:
    server, admin = administered
    asked = {**LONG, "max_tokens": 60}
    whole = server.client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    text = ""
    with server.client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        lines = answer.iter_lines()
        text += re.findall(r'"text":("(?:[^"\\]|\\.)*")', next(line for line in lines if line))[0]
        assert admin.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        info = admin.get("/get_server_info").json()
        assert info["paused"] is True and info["kv.granularity"] == 64
        first = until(lambda: later(server, 0.0), "a snapshot")
        second = until(lambda: later(server, first["time"]), "another one")
        third = until(lambda: later(server, second["time"]), "one more")
        assert second["counters"]["steps"] == third["counters"]["steps"] and third["has_work"]
        assert admin.post("/flush_cache").json()["error"]["code"] == "not_idle"
        assert admin.post("/continue_generation").status_code == 200
        rest = "".join(line for line in lines)
    pieces = [text, *re.findall(r'"text":("(?:[^"\\]|\\.)*")', rest)]
    assert "".join(map(unquoted, pieces)) == whole and rest.endswith("data: [DONE]")


def later(server: RunningServer, than: float) -> dict[str, Any] | None:
    """The snapshot, where it was taken later than that."""
    snapshot = server.state()["snapshot"]
    return dict(snapshot) if snapshot is not None and snapshot["time"] > than else None


def unquoted(text: str) -> str:
    return str(httpx.Response(200, content=text).json())


def test_a_flush_forgets_what_was_cached(administered: tuple[RunningServer, httpx.Client]) -> None:
    server, admin = administered
    prompt = "It was a dark and stormy night. " * 20
    cached_tokens(server, prompt)
    assert cached_tokens(server, prompt) > 64
    assert admin.post("/flush_cache", json={"timeout": 30}).text == "Cache flushed.\n"
    assert cached_tokens(server, prompt) == 0


def test_whoever_leaves_frees_its_blocks(administered: tuple[RunningServer, httpx.Client]) -> None:
    server, _ = administered
    with server.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 2000, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: httpx closes a stream whose reader is gone
        next(lines)
        until(lambda: held_blocks(server.state()), "the engine tells that blocks are held")
    until(lambda: not held_blocks(server.state()), "the blocks are free")
    assert server.state()["snapshot"]["running"] == 0


def test_an_abort_ends_the_stream_and_frees_its_blocks(administered: tuple[RunningServer, httpx.Client]) -> None:
    server, admin = administered
    asked = {**LONG, "max_tokens": 2000, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=asked, headers={"X-Request-Id": "mine"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert admin.post("/abort_request", json={"rid": "mine"}).json() == {"aborted_choices": 1}
        rest = [line for line in lines if line]
    assert '"code":"aborted"' in rest[-2] and rest[-1] == "data: [DONE]"
    until(lambda: not held_blocks(server.state()), "the blocks are free")


def test_the_port_is_for_this_machine_and_taken_at_once(administered: tuple[RunningServer, httpx.Client]) -> None:
    server, admin = administered
    assert admin.get("/version").json() == server.client.get("/version").json()
    assert server.client.post("/pause").status_code == 404, "the API's port has no administration"
