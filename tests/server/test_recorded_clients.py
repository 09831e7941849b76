"""Requests as other programs send them, recorded: they are served, and what those programs read is there."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from events import events_of
from scripted_engine import scripted_config
from served_thread import ServedThread

RECORDED: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "recorded/clients.json").read_text())
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def url() -> Any:
    with ServedThread(scripted_config(chat_template=TEMPLATE)) as served:
        yield served.url


@pytest.mark.parametrize(
    "recorded",
    [pytest.param(one, id=one["what"][:40]) for one in (*RECORDED["aider"], *RECORDED["open-webui"])],
)
def test_chats_of_other_programs(url: str, recorded: dict[str, Any]) -> None:
    answer = httpx.post(url + recorded["path"], json=recorded["body"])
    assert answer.status_code == 200, answer.text
    if not recorded["body"]["stream"]:
        message = answer.json()["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", "hello")
        return
    chunks = events_of(answer.text)
    spoken = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in spoken) == "hello"
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usage) == ("stream_options" in recorded["body"])
    assert all(one["prompt_tokens"] and one["completion_tokens"] for one in usage)


def loglikelihoods(answer: dict[str, Any], contexts: list[int]) -> list[tuple[float, bool]]:
    """What lm-eval reads of the prompt's log-probabilities: their sum past the context, and whether all were greedy."""
    read = []
    for choice, context in zip(sorted(answer["choices"], key=lambda one: one["index"]), contexts, strict=True):
        values = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        read.append((sum(values), greedy))
    return read


@pytest.mark.parametrize("at", [0, 1])
def test_loglikelihood_as_lm_eval_asks_for_it(url: str, at: int) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=RECORDED["lm-eval"][at]["body"])
    assert answer.status_code == 200, answer.text
    (hello, _), (hi, greedy) = loglikelihoods(answer.json(), [2 + at, 1 + at])  # texts begin with a token more
    assert hello == pytest.approx(-sum(b"llo") / 100)  # the scripted engine's log-probability of a token is -id/100
    assert hi == pytest.approx(-sum(b"i!") / 100) and greedy


def test_generation_as_lm_eval_asks_for_it(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=RECORDED["lm-eval"][2]["body"]).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "hello")]


def test_a_long_prompt_is_refused_in_the_words_that_clients_know(url: str) -> None:
    """litellm finds them, in any case, before aider shortens its conversation."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x" * 600}]}
    error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
    assert "this model's maximum context length is 512 tokens" in error["message"].lower()
