"""One small random model behind the real server: models, a completion twice, a stream, and what it computes on."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml

from scripts.device_check.results import PartResult
from scripts.device_check.target import Target
from tokenspeed.cli.temporary_server import temporary_server
from tokenspeed.recipes.flags import FLAGS

RECIPE = Path(__file__).resolve().parents[2] / "configs/recipes/qwen3-8b.yaml"
TOKENS = 12


def recipe_for(vendor: str, folder: Path) -> tuple[Path, str]:
    """A recipe whose smoke profile is there for the vendor's devices too; and the name of that profile."""
    values = yaml.safe_load(RECIPE.read_text("utf-8"))
    smoke = values["profiles"]["smoke"]
    name = "smoke" if vendor == "cpu" else "device"
    values["profiles"] = {"smoke": smoke, name: {**smoke, "when": {"vendor": vendor}}}
    path = folder / RECIPE.name
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path, name


def serve_arguments(target: Target, folder: Path) -> list[str]:
    """Of ``tokenspeed``, for a smoke model on the target's devices."""
    recipe, profile = recipe_for(target.vendor, folder)
    options = ["--max-model-len", "512", "--max-num-seqs", "4", "--host", "127.0.0.1"]
    if any(flag.name == "--device" for flag in FLAGS):
        options += ["--device", target.kind]
    return ["serve", str(recipe), "--profile", profile, *options]


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
    with (
        TemporaryDirectory() as folder,
        temporary_server(serve_arguments(target, Path(folder)), "the smoke model") as url,
        httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client,
    ):
        ask(client, target.kind, result)
    return result.settle()
