"""The real model over a cache of 8 bits, served over HTTP: half the bytes, probabilities near those of 16 bits, and
answers that begin alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import RunningServer

TEXT = (Path(__file__).parents[2] / "docs/deploying.md").read_text("utf-8")[:3000]
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time there was a",
    "2 + 2 =",
    "The sun rises in the",
)


@pytest.fixture(scope="module")
def eight(smollm2: Path) -> Iterator[RunningServer]:
    flags = ("--kv-cache-dtype", "float8_e4m3", "--max-model-len", "2048", "--overlap-depth", "1")
    with RunningServer("smollm2-135m", *flags) as running:
        yield running


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    answer = server.client.post("/v1/completions", json={"model": "smollm2-135m", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_the_plan_that_is_printed_has_half_the_bytes(eight: RunningServer) -> None:
    assert "kv        attention (full_history): 11,520 B a token in float8_e4m3" in eight.output


def test_probabilities_of_a_text_are_near_those_of_sixteen_bits(server: RunningServer, eight: RunningServer) -> None:
    """Values that are read at half or twice their size keep a tenth of the best tokens, elements of e5m2 88 %."""
    one, other = (
        complete(each, prompt=TEXT, max_tokens=0, echo=True, logprobs=1)["logprobs"] for each in (server, eight)
    )
    assert one["tokens"] == other["tokens"]
    wide, narrow = (np.array(found["token_logprobs"][1:], np.float64) for found in (one, other))
    assert len(wide) > 600
    apart = np.abs(wide - narrow)
    assert 1e-4 < apart.mean() < 0.15
    best = [max(top, key=top.get) for top in one["top_logprobs"][1:]]
    kept = [max(top, key=top.get) for top in other["top_logprobs"][1:]]
    assert np.mean([a == b for a, b in zip(best, kept, strict=True)]) > 0.9


def test_answers_begin_alike(server: RunningServer, eight: RunningServer) -> None:
    equal = sum(
        complete(server, prompt=prompt, max_tokens=1)["text"] == complete(eight, prompt=prompt, max_tokens=1)["text"]
        for prompt in PROMPTS
    )
    assert equal >= len(PROMPTS) - 2
    assert "Paris" in complete(eight, prompt=PROMPTS[0], max_tokens=6)["text"]
