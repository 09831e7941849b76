"""The recipe commands as processes: what they print, how they end, and that none of them needs torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def tokenspeed(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenspeed.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:

    return {**os.environ, "TOKENSPEED_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def test_the_list_for_a_machine_that_is_not_here(environment: dict[str, str]) -> None:
    done = tokenspeed("recipe", "list", "--hardware", "mi355x", environment=environment)
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert "mi355x-mxfp4 (unsupported), needs" in lines["kimi-k2.5"]
    assert "on each of 8" in lines["kimi-k2.5"]
    fitting = tokenspeed("recipe", "list", "--fits", "--hardware", "cpu", environment=environment).stdout
    assert "smollm2-135m" in fitting
    assert "qwen3-8b" not in fitting
    assert "kimi-k2.5" not in fitting


def test_solving_prints_the_largest_value_that_fits(environment: dict[str, str]) -> None:
    done = tokenspeed(
        "recipe", "plan", "gpt-oss-120b", "--hardware", "h100", "--solve", "max_seqs", environment=environment
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "solved    scheduler.max_seqs = 2: the largest that fits"
    wrong = tokenspeed(
        "recipe", "plan", "gpt-oss-120b", "--hardware", "h100", "--solve", "seqs", environment=environment
    )
    assert wrong.returncode == 2
    assert "max_len (one request) or max_seqs" in wrong.stderr


def test_what_does_not_fit_ends_with_3_and_the_figures(environment: dict[str, str]) -> None:
    done = tokenspeed(
        "recipe", "plan", "kimi-k2.5", "--hardware", "h100", "--profile", "h200-int4", environment=environment
    )
    assert done.returncode == 3
    assert "short before any KV cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_impossible_division_ends_with_2_and_the_place(environment: dict[str, str]) -> None:
    done = tokenspeed(
        "recipe", "plan", "kimi-k2.5", "--hardware", "h200", "--set", "parallel.tp=3", environment=environment
    )
    assert done.returncode == 2
    assert "SET parallel.tp: kimi-k2.5: parallel.tp is 3: 64 attention heads are not a multiple of 3" in done.stderr


@pytest.mark.parametrize("command", ["plan", "explain", "diff"])
def test_secrets_among_the_variables_are_blanked(command: str, environment: dict[str, str]) -> None:
    secret = "sesame-0123456789"
    arguments = ["recipe", command, "smollm2-135m", "--profile", "smoke", "--set", f"env.GITHUB_TOKEN={secret}"]
    done = tokenspeed(*arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    assert secret not in done.stdout
    assert "env.GITHUB_TOKEN" in done.stdout


def test_the_schema_is_json(environment: dict[str, str]) -> None:
    done = tokenspeed("recipe", "schema", environment=environment)
    assert json.loads(done.stdout)["title"] == "A TokenSpeed recipe"


def test_all_recipes_are_validated_where_none_is_named(environment: dict[str, str]) -> None:
    done = tokenspeed("recipe", "validate", environment=environment)
    assert done.returncode == 0
    assert "kimi-k2.5.yaml: right" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["recipe", "list"],
        ["recipe", "plan", "kimi-k2.5", "--hardware", "b200"],
        ["recipe", "plan", "smollm2-135m", "--solve", "max_len"],
        ["recipe", "diff", "qwen3-8b", "--hardware", "h100", "--set", "scheduler.max_seqs=1"],
        ["recipe", "validate"],
        ["recipe", "schema"],
    ],
    ids=" ".join,
)
def test_no_recipe_command_imports_torch(command: list[str], environment: dict[str, str]) -> None:
    program = (
        "import sys; from tokenspeed.cli.commands import app; sys.argv = ['tokenspeed', *sys.argv[1:]]\n"
        "try: app()\n"
        "finally:\n"
        "    heavy = sorted({'torch', 'transformers', 'uvicorn', 'fastapi'} & set(sys.modules))\n"
        "    print('imported:', heavy, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, env=environment, check=False
    )
    assert "imported: []" in done.stderr, done.stderr
