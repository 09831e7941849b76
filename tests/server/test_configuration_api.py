"""What a server tells of its configuration: every value with its source, memory on both sides, and no secret."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import CONTEXT, MODEL, Stack, scripted_config

from tokenspeed.recipes.machine import detect_machine
from tokenspeed.recipes.overrides import set_values
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.prepare import planned
from tokenspeed.recipes.resolve import model_source, resolve
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.server.app import create_app
from tokenspeed.telemetry.redaction import BLANK

PATH = "/v1/internal/configuration"
MEMORY = {"weights": 100, "KV cache": 50, "libraries": 7, "sum": 157}


def with_keys(settings: dict[str, Any], **changes: Any) -> ResolvedConfig:
    """The scripted engine's configuration with these keys said of it."""
    return scripted_config().model_copy(update={"settings": settings, **changes})


def smoke_config(*assignments: str) -> ResolvedConfig:
    """The smoke profile as a start would run it."""
    machine = detect_machine()
    resolution = resolve("smollm2-135m", machine, profile="smoke", overrides=set_values(list(assignments)))
    source = model_source(resolution)
    assert source is not None
    return planned(resolution.config(source), make_plan(resolution, machine))


async def told(config: ResolvedConfig, facts: dict[str, Any] | None = None, key: str = "") -> dict[str, Any]:
    """The answer of a server with this configuration, whose engine said ``facts`` of itself."""
    stack = Stack(config)
    try:
        engine = await stack.new_engine(ready=facts is None)
        if facts is not None:
            await engine.send_status("ready", facts=facts)
            await stack.llm.engine.wait_ready()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(create_app(stack.llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            answer = await client.get(PATH)
            assert answer.status_code == 200
            return dict(answer.json())
    finally:
        await stack.close()


def by_key(body: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {item["key"]: (item["value"], item["source"]) for item in body["keys"]}


async def test_every_key_of_a_recipe_has_its_value_and_source() -> None:
    config = smoke_config("scheduler.max_seqs=7")
    before = time.time()
    body = await told(config)
    keys = by_key(body)
    assert list(keys) == list(config.settings)
    assert keys["scheduler.max_seqs"] == (7, config.sources["scheduler.max_seqs"])
    assert "SET" in keys["scheduler.max_seqs"][1].upper()
    assert keys["scheduler.chunk"] == (256, "default")
    assert keys["scheduler.mixed"] == (True, "default")
    assert keys["served_name"] == ("", "default")
    assert keys["kv.bytes"] == (config.kv.bytes, "the plan") and config.kv.bytes > 0
    value, source = keys["api.default_sampling.temperature"]
    assert value == 0.2 and source.startswith("recipe (smollm2-135m.yaml:")
    assert (body["model"], body["recipe"], body["profile"], body["recipe_hash"]) == (
        "smollm2-135m-smoke",
        "smollm2-135m",
        "smoke",
        config.recipe_hash,
    )
    assert before - 1 <= body["started"] <= time.time()


async def test_memory_is_told_on_both_sides_with_its_sum() -> None:
    config = with_keys({}, predicted={"weights": 90, "KV cache": 50})
    body = await told(config, {"max_model_len": CONTEXT, "memory": MEMORY})
    assert body["memory"] == {"predicted": {"weights": 90, "KV cache": 50, "sum": 140}, "observed": MEMORY}


async def test_what_is_not_known_is_left_out() -> None:
    body = await told(scripted_config())
    assert body["memory"] == {"predicted": {}, "observed": {}}
    assert body["keys"] == [] and body["model"] == MODEL


async def test_the_observed_memory_is_of_the_last_start(stack: Stack, client: httpx.AsyncClient) -> None:
    for size in (100, 200):
        engine = await stack.new_engine(ready=False)
        await engine.send_status("load")
        while stack.llm.engine.phase != "load":
            await stack.llm.engine.changed()
        await engine.send_status("ready", facts={"memory": {"weights": size, "sum": size}})
        await stack.llm.engine.wait_ready()
        assert (await client.get(PATH)).json()["memory"]["observed"] == {"weights": size, "sum": size}


@pytest.mark.parametrize("name", ["HF_TOKEN", "MY_API_KEY", "CLIENT_SECRET", "DB_PASSWORD"])
async def test_variables_with_a_secrets_name_are_blanked(name: str) -> None:
    body = await told(with_keys({f"env.{name}": "hush", "env.OMP_NUM_THREADS": "2"}))
    assert by_key(body) == {f"env.{name}": (BLANK, "default"), "env.OMP_NUM_THREADS": ("2", "default")}


async def test_secrets_are_blanked_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("correct-horse-battery\n")
    settings = {
        "api.api_key_file": str(file),
        "api.default_sampling.max_tokens": 5,
        "api.chat_template": "say correct-horse-battery",
        "env.NOTE": "it is correct-horse-battery",
        "env.HTTPS_PROXY": "http://user:hush@proxy:3128",
        "env.OTHER": "hidden-elsewhere",
    }
    config = with_keys(settings, env={"A_TOKEN": "hidden-elsewhere"})
    config = config.model_copy(update={"api": config.api.model_copy(update={"api_key_file": str(file)})})
    assert by_key(await told(config, key="correct-horse-battery")) == {
        "api.api_key_file": (str(file), "default"),
        "api.default_sampling.max_tokens": (5, "default"),
        "api.chat_template": (f"say {BLANK}", "default"),
        "env.NOTE": (f"it is {BLANK}", "default"),
        "env.HTTPS_PROXY": (f"http://{BLANK}@proxy:3128", "default"),
        "env.OTHER": (BLANK, "default"),
    }


async def test_it_wants_the_key_that_the_state_wants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("correct-horse-battery\n")
    stack = Stack(scripted_config(api_key_file=str(file)))
    try:
        transport = httpx.ASGITransport(create_app(stack.llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in (PATH, "/v1/internal/state"):
                assert (await client.get(path)).status_code == 401
                given = await client.get(path, headers={"Authorization": "Bearer correct-horse-battery"})
                assert given.status_code == 200
    finally:
        await stack.close()
