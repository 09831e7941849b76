"""The second gesture: one key of a recipe is edited, ``recipe diff`` shows the effect, a restart applies it, and the
dashboard shows the value with its source."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import RunningServer

RECIPE = """\
extends: qwen3-0.6b
name: mine
profiles:
  smoke:
    scheduler: {max_seqs: 4}
    kv: {dtype: bfloat16}
"""


def tokenspeed(*arguments: str) -> str:
    command = [sys.executable, "-m", "tokenspeed.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True).stdout


def configuration(server: RunningServer) -> dict[str, tuple[object, str]]:
    """The keys as the dashboard gets them: value and source."""
    shown = json.loads(tokenspeed("top", "--once", "--json", "--url", server.url))
    return {key["key"]: (key["value"], key["source"]) for key in shown["configuration"]["keys"]}


def test_an_edit_is_shown_applied_and_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENSPEED_RECIPES", str(tmp_path))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    with RunningServer("mine", "--profile", "smoke") as server:
        assert configuration(server)["scheduler.max_seqs"] == (4, "profile smoke (mine.yaml:5)")
    recipe.write_text(RECIPE.replace("max_seqs: 4", "max_seqs: 12"))
    difference = tokenspeed("recipe", "diff", "mine", "--profile", "smoke").splitlines()
    assert difference[0].startswith("from  mine as it started on ")
    changed = [line.split() for line in difference]
    assert ["scheduler.max_seqs", "4", "->", "12", "profile", "smoke", "(mine.yaml:5)"] in changed
    assert any(line.startswith("  KV cache") and " -> " in line and "+" in line for line in difference)
    with RunningServer("mine", "--profile", "smoke") as server:
        after = configuration(server)
        assert after["scheduler.max_seqs"] == (12, "profile smoke (mine.yaml:5)")
        assert after["kv.bytes"][1] == "the plan"
    # The server was started on a port of its own; nothing else is left to apply.
    rest = [line.split()[0] for line in tokenspeed("recipe", "diff", "mine", "--profile", "smoke").splitlines()[2:]]
    assert rest[: rest.index("memory")] == ["api.port"]
