"""lm-eval's local-completions over the real model: the requests that it sends, and what it makes of the answers."""

from typing import Any

import pytest
from running_server import RunningServer

CONTEXT = "The capital of France is"
ENDINGS = (" Paris", " Berlin", " a")


def asked(server: RunningServer, prompts: list[Any]) -> list[dict[str, Any]]:
    """The choices of one request of lm-eval's, by index."""
    body = {"model": "smollm2-135m", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = server.client.post("/v1/completions", json={**body, "seed": 1234, "echo": True})
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))


def loglikelihood(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """As lm-eval reads it: the sum behind the context, without the generated token, and whether all was greedy."""
    values = choice["logprobs"]["token_logprobs"][context:-1]
    tops = choice["logprobs"]["top_logprobs"][context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def ids(server: RunningServer, text: str) -> list[int]:
    return list(server.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])


def test_loglikelihoods_by_ids_by_text_and_one_by_one(server: RunningServer) -> None:
    context = len(ids(server, CONTEXT))
    prompts = [ids(server, CONTEXT + ending) for ending in ENDINGS]
    together = [loglikelihood(choice, context) for choice in asked(server, prompts)]
    alone = [loglikelihood(asked(server, [prompt])[0], context) for prompt in prompts]
    by_text = [loglikelihood(choice, context) for choice in asked(server, [CONTEXT + ending for ending in ENDINGS])]
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone], abs=0.05)
    assert by_text == together
    paris, berlin, _ = (value for value, _ in together)
    assert 0 > paris > berlin


def test_what_the_model_says_by_itself_is_greedy(server: RunningServer) -> None:
    body = {"model": "smollm2-135m", "prompt": CONTEXT, "max_tokens": 5, "temperature": 0}
    said = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    context = len(ids(server, CONTEXT))
    whole, strange = asked(server, [ids(server, CONTEXT + said), ids(server, CONTEXT + " purple")])
    assert loglikelihood(whole, context)[1] and not loglikelihood(strange, context)[1]
