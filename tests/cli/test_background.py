"""A server in the background, from its start to its end, by the commands an operator has: run, status, logs, stop."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed.cli import background
from tokenspeed.cli.temporary_server import temporary_server


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of one operator with a cache of their own; whatever still runs at the end is stopped."""
    variables = {**os.environ, "TOKENSPEED_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    yield variables
    tokenspeed(variables, "stop")


def tokenspeed(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    command = [sys.executable, "-m", "tokenspeed.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


def test_a_server_in_the_background(environment: dict[str, str], tmp_path: Path) -> None:
    smoke = ("run", "smollm2-135m", "--profile", "smoke", "--max-num-seqs", "2", "--kv-cache-gb", "0.02")
    started = tokenspeed(environment, *smoke, "--port", "0", "--detach")
    assert started.returncode == 0, started.stdout + started.stderr
    found = re.search(r"ready: smollm2-135m-smoke at http://127\.0\.0\.1:(\d+)/v1", started.stdout)
    assert found is not None, started.stdout
    port = found[1]
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in started.stdout
    assert "make top" in started.stdout

    told = tokenspeed(environment, "status")
    assert told.returncode == 0
    assert f"http://127.0.0.1:{port}  smollm2-135m-smoke" in told.stdout
    assert "live 200  ready 200  progress 200" in told.stdout
    # The dashboard finds the only server there is.
    dashboard = tokenspeed(environment, "top", "--once", "--json")
    assert f'"url": "http://127.0.0.1:{port}"' in dashboard.stdout
    # Another one on the same port is refused before it loads anything.
    second = tokenspeed(environment, *smoke, "--port", port)
    assert second.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken" in second.stderr

    assert "RANDOM WEIGHTS" in tokenspeed(environment, "logs").stdout
    ended = tokenspeed(environment, "stop", "--port", port)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "stopped")
    assert tokenspeed(environment, "status").returncode == 1
    assert not list((tmp_path / "run").glob("*.json"))


def test_a_background_start_that_fails_says_why(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["SomethingElse"]}')
    done = tokenspeed(environment, "serve", str(tmp_path), "--port", "0", "--detach")
    assert done.returncode == 2
    assert "SomethingElse" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_interrupted_start_leaves_no_temporary_server(
    own_machine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(background.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt), temporary_server(["serve", "smollm2-135m", "--profile", "smoke"], "smoke"):
        pytest.fail("it is not ready at once")
    pid = re.search(r"pid (\d+)", capfd.readouterr().err)
    assert pid is not None
    assert not Path(f"/proc/{pid[1]}").exists()
