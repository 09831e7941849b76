"""``tokenspeed pull`` against a hub on a loopback port; as a real process where it is killed or not alone."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stand_in_hub import Fault, StandInHub, stand_in_hub

from tokenspeed.cli import main as command

MIB = 1 << 20
COMMIT = "c" * 40
LONG = bytes(range(256)) * (48 * 4096)
"""48 MiB: more than the sockets between two processes hold, so that a server that has sent 40 has been read from."""
FILES = {
    "config.json": b'{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(1000),
}
RECIPE = """\
extends: qwen3-0.6b
name: pulled
repository: someone/model
revision: {revision}
weights: {{repository: someone/model, revision: {revision}, bytes: 0}}
"""
SECRET = "hf_s3cret"

Start = Callable[[], "subprocess.Popen[str]"]
Pull = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    """A hub with one model."""
    with stand_in_hub() as server:
        server.add("someone/model", dict(FILES), COMMIT)
        yield server


@pytest.fixture
def held(hub: StandInHub) -> StandInHub:
    """Its weights are long, and their first download stops after 40 MiB."""
    hub.repositories["someone/model"].files["model.safetensors"] = LONG
    hub.fail("model.safetensors", Fault(hold=40 * MIB))
    return hub


@pytest.fixture
def variables(hub: StandInHub, tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose recipe ``pulled`` is on that hub, with an empty cache."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "pulled.yaml").write_text(RECIPE.format(revision=COMMIT))
    return {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_ENDPOINT": hub.address,
        "NO_PROXY": "127.0.0.1",
        "TOKENSPEED_CACHE": str(tmp_path / "cache"),
        "TOKENSPEED_RECIPES": str(recipes),
    }


@pytest.fixture
def start(variables: dict[str, str]) -> Start:
    """Starts ``tokenspeed pull pulled`` as a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}

    def started() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "tokenspeed.cli", "pull", "pulled"],
            env={**kept, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


@pytest.fixture
def pull(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Pull:
    """Runs ``tokenspeed pull pulled`` with more arguments in this process: exit code, output, errors."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read when some test before imported it

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tokenspeed", "pull", "pulled", *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def ended(process: "subprocess.Popen[str]", code: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def snapshot(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "hub" / "models--someone--model" / "snapshots" / COMMIT


def partial_size(tmp_path: Path) -> int:
    (partial,) = (snapshot(tmp_path).parent.parent / "blobs").glob("*.incomplete")
    return partial.stat().st_size


def assert_whole(tmp_path: Path) -> None:
    assert {file.name: file.read_bytes() for file in snapshot(tmp_path).iterdir()} == FILES


def test_killed_midway_it_goes_on_from_the_byte_it_had(held: StandInHub, start: Start, tmp_path: Path) -> None:
    process = start()
    assert held.holding.wait(60)
    process.kill()
    process.communicate(timeout=60)
    held.release()
    kept = partial_size(tmp_path)
    assert kept > MIB
    out, err = ended(start(), 0)
    assert out == f"{snapshot(tmp_path)}: fetched, sizes and checksums compared\n"
    assert re.search(rf"download someone/model at revision {COMMIT}  \S+ MiB of 48.00 MiB", err)
    _, second = held.downloads("model.safetensors")
    assert (second.start, second.sent) == (kept, len(LONG) - kept)
    assert (snapshot(tmp_path) / "model.safetensors").read_bytes() == LONG


def test_interrupted_it_says_that_what_has_come_is_kept(held: StandInHub, start: Start, tmp_path: Path) -> None:
    process = start()
    assert held.holding.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = ended(process, 130)
    assert "*** interrupted: what has come is kept, and the same command goes on from there" in err
    assert partial_size(tmp_path) > MIB


def test_two_processes_at_once_download_once(hub: StandInHub, start: Start, tmp_path: Path) -> None:
    hub.fail("model.safetensors", Fault(hold=500))
    first = start()
    assert hub.holding.wait(60)
    second = start()
    assert second.stderr is not None
    waiting = next(line for line in second.stderr if line.startswith("wait "))
    assert "another process that fetches someone/model" in waiting
    hub.release()
    ended(first, 0)
    ended(second, 0)
    assert {path: len(hub.downloads(path)) for path in FILES} == dict.fromkeys(FILES, 1)
    assert_whole(tmp_path)


def test_checked_damaged_named_repaired(
    hub: StandInHub, pull: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, FILES.values()))
    code, out, _ = pull("--dry-run")
    assert (code, f"3 files, {size:,} bytes; 3 missing, {size:,} bytes to fetch" in out) == (0, True)
    assert not (tmp_path / "hub").exists()
    assert pull()[0] == 0
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        code, out, _ = pull()
    assert (code, out) == (0, f"{snapshot(tmp_path)}: here, 3 files, {size:,} bytes, checksums compared\n")
    damaged = snapshot(tmp_path) / "tokenizer.json"
    damaged.write_bytes(b"[]")
    code, out, _ = pull("--quick")
    assert (code, out) == (0, f"{snapshot(tmp_path)}: here, sizes compared\n")
    code, _, err = pull("--profile", "cpu")
    assert code == 2
    assert f"tokenspeed: {damaged} is damaged: git's sha1 is " in err
    assert err.endswith("again: tokenspeed pull pulled --profile cpu --repair\n")
    hub.log.clear()
    code, out, _ = pull("--repair")
    assert (code, f"{damaged} was damaged: fetched again" in out) == (0, True)
    assert [asked.path for asked in hub.log] == ["", "tokenizer.json"]
    assert_whole(tmp_path)


def test_a_branch_is_named_with_its_commit_and_a_token_is_read_from_a_file(
    hub: StandInHub, pull: Pull, tmp_path: Path
) -> None:
    hub.repositories["someone/model"].token = SECRET
    (tmp_path / "recipes" / "pulled.yaml").write_text(RECIPE.format(revision="main"))
    code, _, err = pull()
    assert (code, "it is gated, and no token was found" in err) == (2, True)
    (tmp_path / "token").write_text(f"{SECRET}\n")
    code, out, err = pull("--token-file", str(tmp_path / "token"))
    assert (code, out) == (
        0,
        f"{snapshot(tmp_path)} (main is commit {COMMIT}): fetched, sizes and checksums compared\n",
    )
    assert SECRET not in out + err
    code, out, _ = pull("--token-file", str(tmp_path / "token"))
    assert (code, f"(main is commit {COMMIT}): here, 3 files" in out) == (0, True)


def test_offline_and_not_here(hub: StandInHub, pull: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = pull()
    assert (code, "HF_HUB_OFFLINE=1 forbids to ask the hub" in err) == (2, True)
    assert hub.log == []


def test_random_weights_need_nothing(hub: StandInHub, pull: Pull) -> None:
    assert pull("--profile", "smoke")[:2] == (0, "profile smoke has random weights: nothing to fetch\n")
    assert hub.log == []
