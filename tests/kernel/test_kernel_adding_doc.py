"""docs/adding-a-kernel.md is not a story: its files are written to a folder, and its commands are run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding-a-kernel.md"
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<content>.*?)```", re.DOTALL)
COMMANDS = re.compile(r"## Try it\n\n```console\n(?P<lines>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("doc")
    for match in FILE.finditer(DOCUMENT.read_text(encoding="utf-8")):
        path = place / "acme" / match["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(match["content"], encoding="utf-8")
    return place


def run(place, line, typed=""):
    """Runs one documented line, its environment assignments and its commands as this interpreter has them."""
    words = shlex.split(line)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_KERNEL_")}
    environment["TOKENSPEED_CACHE"] = str(place / "cache")
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    commands = {
        "python": [sys.executable],
        "tokenspeed-kernel": [sys.executable, "-m", "tokenspeed_kernel.plugins.cli"],
    }
    return subprocess.run(
        commands[words[0]] + words[1:],
        input=typed,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_documented_commands_do_what_the_document_says(place):
    lines = [line.removeprefix("$ ") for line in COMMANDS.search(DOCUMENT.read_text())["lines"].splitlines()]
    listed, explained, verified = (run(place, line) for line in lines)
    assert (listed.returncode, explained.returncode, verified.returncode) == (0, 0, 0), verified.stdout
    assert re.search(rf"acme_norm_rms +plugin +runs here  \({place}/acme\)", listed.stdout)
    assert "acme_gemm_linear [plugin]" in explained.stdout
    assert re.search(r"acme_gemm_linear +right, error 0\.\d+ of bound, \d+ cases", verified.stdout)
    assert re.search(r"acme_norm_rms +right", verified.stdout)


ONE_AFTER_ANOTHER = """
import os, shlex, sys
from tokenspeed_kernel.plugins.cli import main
for line in sys.stdin.read().splitlines():
    words = shlex.split(line)
    sys.stdout.flush()
    child = os.fork()  # a process of its own for each line, without importing torch each time
    if child == 0:
        while "=" in words[0]:
            name, _, os.environ[name] = words.pop(0).partition("=")
        print("status", main(words[1:]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_the_documented_tuning_makes_the_strangers_kernel_a_measured_one(place):
    section = DOCUMENT.read_text().partition("## How fast it is")[2].partition("## ")[0]
    lines = [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ ")]
    done = run(place, f"python -c {shlex.quote(ONE_AFTER_ANOTHER)}", "\n".join(lines))
    assert done.stdout.count("status 0\n") == 4, done.stdout + done.stderr
    benched, verified, tuned, explained, end = done.stdout.split("status 0\n")
    assert end == "", done.stderr
    assert re.search(r"acme_norm_rms +\d+\.\d us .* x reference", benched)
    assert re.search(r"acme_norm_rms +right", verified)
    assert "latencies written to tuned.json" in tuned
    assert re.search(r"acme_norm_rms \[plugin\]  \d+\.\d us measured; .* verified, error", explained)


def test_register_alone_says_how_to_keep_it(place):
    done = run(place, "tokenspeed-kernel --register ./acme")
    assert done.returncode == 0
    assert f"acme_norm_rms  norm.rms  ({place}/acme)" in done.stdout
    assert f"export TOKENSPEED_KERNEL_PLUGIN_PATH={place}/acme" in done.stdout
