"""One small random model behind the real server: models, a completion twice, a stream, and what it computes on."""

import json
import sys
from typing import Any

import httpx

from scripts.device_check.results import PartResult
from scripts.device_check.target import Target
from tokenspeed.cli.temporary_server import temporary_server
from tokenspeed.recipes.flags import FLAGS

RECIPE = ("qwen3-8b", "--profile", "smoke")
TOKENS = 12


def serve_arguments(kind: str) -> list[str]:
    """Of ``tokenspeed``, for a smoke model on devices of ``kind``, as far as its command line lets one say that."""
    options = ["--max-model-len", "512", "--max-num-seqs", "4", "--host", "127.0.0.1"]
    if any(flag.name == "--device" for flag in FLAGS):
        options += ["--device", kind]
    return ["serve", *RECIPE, *options]


def ask(client: httpx.Client, kind: str, result: PartResult) -> None:
    """Puts the questions to a server that is ready."""
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    state = client.get("/v1/internal/state").raise_for_status().json()
    computes_on = state["facts"]["device"]
    note = result.checks if computes_on == kind else result.problems
    note.append(f"the engine computes on {computes_on}" + ("" if computes_on == kind else f", not on {kind}"))
    doubts = state["facts"].get("kernel_doubts") or {}
    result.checks.append(f"kernels whose numbers nobody verified here: {', '.join(sorted(doubts)) or 'none'}")
    body: dict[str, Any] = {"model": model, "prompt": "A server that answers", "max_tokens": TOKENS, "temperature": 0}
    texts = []
    for _ in range(2):
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        texts.append(answer["choices"][0]["text"])
        if not 0 < answer["usage"]["completion_tokens"] <= TOKENS:
            result.problems.append(f"usage says {answer['usage']}, {TOKENS} tokens were asked for")
    streamed = ""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if line.startswith("data: ") and data != "[DONE]":
                streamed += json.loads(data)["choices"][0]["text"]
    if texts[0] == texts[1] == streamed:
        result.checks.append("the same prompt gives the same text, streamed or not")
    else:
        result.problems.append(f"one prompt, three texts: {texts[0]!r}, {texts[1]!r}, streamed {streamed!r}")


def run(target: Target) -> PartResult:
    """Serves and asks."""
    result = PartResult("served model")
    arguments = serve_arguments(target.kind)
    print("tokenspeed", *arguments, file=sys.stderr)
    with (
        temporary_server(arguments, "the smoke model") as url,
        httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client,
    ):
        ask(client, target.kind, result)
    return result.settle()
