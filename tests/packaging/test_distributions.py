"""What is installed from where: our names never reach the package index, the base has no torch, the wheel is whole."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.recipes.flags import FLAGS

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("build", "run", "web", "test", "dev")


def third_party(group: str) -> list[str]:
    """The lines scripts/third_party.py prints."""
    script = ROOT / "scripts" / "third_party.py"
    done = subprocess.run([sys.executable, str(script), group], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def name_of(line: str) -> str:
    """The distribution a requirement names."""
    found = re.match(r"[A-Za-z0-9._-]+", line)
    assert found is not None
    return found[0].lower()


def project(path: str) -> dict[str, Any]:
    """A pyproject.toml."""
    return tomllib.loads((ROOT / path / "pyproject.toml").read_text())


@pytest.mark.parametrize("group", GROUPS)
def test_our_own_names_are_never_asked_of_the_index(group: str) -> None:
    names = [name_of(line) for line in third_party(group)]
    assert names
    assert not [name for name in names if name.startswith("tokenspeed")]
    assert len(set(names)) == len(names)


def test_every_requirement_has_a_lower_and_an_upper_bound() -> None:
    for group in GROUPS:
        for line in third_party(group):
            assert ">=" in line, line
            assert "<" in line, line


@pytest.mark.parametrize(
    "folder",
    [
        ".",
        "scheduler",
        "kernel-backends/core",
        "kernel-backends/cpu",
        "kernel-backends/mla",
        "kernel-backends/triton",
        "tui",
    ],
)
def test_each_distribution_is_ours_by_name_and_licence(folder: str) -> None:
    found = project(folder)["project"]
    assert found["name"].startswith("tokenspeed-appliance")
    assert found["license"] == "Apache-2.0 OR MIT"
    assert found["requires-python"] == ">=3.11"


def test_the_base_installs_without_torch() -> None:
    base = [name_of(line) for line in project(".")["project"]["dependencies"]]
    assert not {"torch", "transformers", "safetensors"} & set(base)
    assert not [name for name in base if name.startswith("tokenspeed")]
    assert "transformers" not in " ".join(third_party("run"))


def test_the_api_process_never_imports_torch() -> None:
    program = (
        "import sys, json\n"
        "import tokenspeed.launch.serve, tokenspeed.server.app, tokenspeed.frontend.async_llm\n"
        "heavy = {'torch', 'transformers', 'tokenspeed_kernel', 'tokenspeed_scheduler'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_each_room_is_under_the_import_contract() -> None:
    contracts = project(".")["tool"]["importlinter"]["contracts"]
    bound = {source for contract in contracts for source in contract["source_modules"]}
    rooms = {f"tokenspeed.{path.parent.name}" for path in (ROOT / "tokenspeed").glob("*/__init__.py")}
    # launch may see everything; every other room has a rule.
    assert rooms - bound == {"tokenspeed.launch"}


def test_the_wheel_carries_recipes_and_works_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("tokenspeed_appliance-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "tokenspeed/_configs/recipes/smollm2-135m.yaml" in names
    assert "tokenspeed/py.typed" in names
    assert {name.rsplit("/", 1)[-1] for name in names if "/licenses/" in name} == {"LICENSE-APACHE", "LICENSE-MIT"}
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop("TOKENSPEED_RECIPES", None)
    listed = subprocess.run(
        [sys.executable, "-m", "tokenspeed.cli", "recipe", "show", "kimi-k2.5"],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert str(site) in listed.stdout.splitlines()[0]


def test_every_dependency_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    missing = [line for group in GROUPS for line in third_party(group) if name_of(line) not in text.lower()]
    assert not missing


def test_the_table_of_flags_is_the_programs_own() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `([a-z_.]+)` \| (.+) \|$", text, flags=re.MULTILINE)
    assert rows == [(flag.name, flag.key, flag.help) for flag in FLAGS]
