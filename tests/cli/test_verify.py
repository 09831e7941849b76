"""``bench`` and ``verify`` against a real server of the smoke profile."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from command_line import Command
from running_server import RunningServer, run_cli

from tokenspeed.cli import checks
from tokenspeed.cli.measure import Measurement, render_measurement
from tokenspeed.recipes.catalogue import configs_directory, load_recipe

RECIPE = "smollm2-135m"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for the module, with a key, and on record in a cache of its own."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "key").write_text("sk-test\n")
    environment = {"TOKENSPEED_CACHE": str(folder / "cache")}
    flags = ("--profile", "smoke", "--kv-cache-gb", "0.1", "--api-key-file", str(folder / "key"))
    with RunningServer(RECIPE, *flags, environment=environment) as running:
        running.client.headers["Authorization"] = "Bearer sk-test"
        yield running


@pytest.fixture
def key(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key file of the server, whose records are those of this operator."""
    folder = Path(server.command[-1]).parent
    monkeypatch.setenv("TOKENSPEED_CACHE", str(folder / "cache"))
    return str(folder / "key")


def test_bench_measures_what_it_has_time_for(server: RunningServer, key: str, tokenspeed: Command) -> None:
    done = tokenspeed("bench", "--json", "--api-key-file", key)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["model"] == f"{RECIPE}-smoke"
    assert [row["streams"] for row in found["decode"]] == [1, 8, 32]
    assert found["prefill"]["prompt_tokens"] == 1024
    assert all(row["tokens_per_s"] > 0 and row["first_token_ms"] > 0 for row in found["decode"])
    assert found["left_out"] == []
    # No prompt was in a cache: nothing was measured twice.
    hits = server.client.get("/metrics").text
    assert re.search(r"^tokenspeed_engine_prefix_hit_tokens_total 0\.0$", hits, re.MULTILINE)


def test_bench_serve_loads_a_server_of_ours(
    server: RunningServer, key: str, tokenspeed: Command, tmp_path: Path
) -> None:
    """Found by its name; exact lengths by token ids; a growing session finds its beginning in the cache."""
    path = tmp_path / "r.json"
    line = ("bench", "serve", "--model", RECIPE, "--api-key-file", key, "--json", str(path))
    done = tokenspeed(*line, "-c", "4", "-n", "8", "--input-len", "64", "--output-len", "16")
    assert done.code == 0, done.err
    found = json.loads(path.read_text())
    (level,) = found["levels"]
    assert (level["completed"], level["input_tokens"], level["output_tokens"]) == (8, 8 * 64, 8 * 16)
    assert (level["cached_share"], level["peak_concurrency"]) == (0, 4)
    assert found["notes"] == [] and found["workload"]["prompts"] == "token ids"
    keys = {item["key"]: item["value"] for item in found["server"]["facts"]["configuration"]["keys"]}
    assert keys["kv.granularity"] == 64
    assert "RANDOM WEIGHTS" in done.err

    sessions = "-w sessions --sessions 1 --turns 3 --prefix-len 128 --output-len 8"
    done = tokenspeed(*line, *sessions.split())
    assert done.code == 0, done.err
    level = json.loads(path.read_text())["levels"][0]
    turns, tiers = level["turns"], level["tiers"]
    assert tiers["device"] == sum(answer["cached_tokens"] for answer in level["answers"])
    assert (tiers["looked_up"], tiers["host"], tiers["storage"]) == (level["input_tokens"], 0, 0)
    assert [turn["turn"] for turn in turns] == [0, 1, 2]
    assert turns[0]["cached"] == 0 and turns[1]["cached"] > 0.25 and turns[2]["cached"] > turns[1]["cached"]

    done = tokenspeed(*line, *["-w", "mixture", "--decoders", "2", "--prompt-len", "512"])
    assert done.code == 0, done.err
    assert json.loads(path.read_text())["mixture"]["whole"]


def test_what_there_was_no_time_for_is_named() -> None:
    lines = render_measurement(Measurement("m", left_out=["prefill", "decode at 1 streams"]))
    assert lines[-1].strip().startswith("not measured, the time was up: prefill, decode at 1 streams")


MISTAKES = [
    ("bench nobody", "no server of yours serves nobody (running: smollm2-135m-smoke)"),
    ("bench --url http://127.0.0.1:9", "http://127.0.0.1:9: no server answers"),
    ("bench", "status 401"),
    ("bench --api-key-file /absent", "the API key file /absent cannot be read"),
    ("verify ./", "./ is a path"),
    ("verify kimi-k2.5 --profile h200-int4", "profile h200-int4 of kimi-k2.5 is unsupported"),
]


@pytest.mark.parametrize(("line", "told"), MISTAKES)
def test_mistakes(
    server: RunningServer,
    key: str,
    tokenspeed: Command,
    line: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    done = tokenspeed(*line.split())
    assert (done.code, told in done.err) == (2, True), done.err


def test_verify_tells_what_it_saw(
    server: RunningServer, key: str, tokenspeed: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("verify", RECIPE, "--profile", "smoke", "--api-key-file", key)
    done = tokenspeed(*arguments)
    assert done.code == 0, done.out + done.err
    passed = [line for line in done.out.splitlines() if line.startswith("ok  ")]
    assert len(passed) == len(checks.CHECKS)
    assert f"using the server that runs at {server.url}" in done.err
    kept = Path(os.environ["TOKENSPEED_CACHE"]) / "verified" / f"{RECIPE}-smoke.yaml"
    assert "workload: prefill of 1024 random tokens alone" in kept.read_text()

    # A check that fails is named, and so is what there was no time for.
    async def broken(_: object) -> str:
        raise AssertionError("nothing answers")

    monkeypatch.setitem(checks.CHECKS, "answers", broken)
    failed = tokenspeed(*arguments, "--json", "--seconds", "60")
    assert failed.code == 1
    told = json.loads(failed.out)
    assert told["passed"] is False
    assert told["checks"][0] == {"name": "answers", "passed": False, "told": "nothing answers"}


@pytest.mark.long
def test_verify_writes_what_it_saw_and_judges_the_model(own_machine: Path, tmp_path: Path) -> None:
    """The real model: its opinion of plain text is kept, and a threshold above it fails the next time."""
    packages = Path(platformdirs.user_cache_dir("tokenspeed")) / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    own_machine.mkdir()
    (own_machine / "packages").symlink_to(packages)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    path = recipes / f"{RECIPE}.yaml"
    path.write_text((configs_directory() / "recipes" / path.name).read_text())
    before = path.read_text().splitlines()
    environment = {"TOKENSPEED_RECIPES": str(recipes)}
    command = ("verify", RECIPE, "--write", "--seconds", "40")
    done = run_cli(*command, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = load_recipe(path).recipe.profiles["cpu"].verified
    assert verified is not None
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=configs_directory(), capture_output=True, text=True)
    assert verified.commit == head.stdout.strip()
    assert verified.results["decode_tokens_per_s_1"]
    assert [line for line in path.read_text().splitlines() if line in before] == before
    prose = verified.accuracy["prose_logprob"]
    assert -4 < prose.value < -1

    path.write_text(path.read_text().replace(f"threshold: {prose.threshold}", "threshold: -0.1"))
    text = path.read_text()
    again = run_cli(*command, environment=environment)
    assert again.returncode == 2
    assert "FAIL  accuracy" in again.stdout
    assert "was not changed: not everything passed" in again.stderr
    assert path.read_text() == text
    assert run_cli("status").returncode == 1
