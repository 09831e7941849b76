"""A server in a container, from its start to its end, with a script that stands for docker; and what is chosen when."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_docker
import pytest
from command_line import Command
from fake_programs import only_programs, put_program

from tokenspeed.cli.ports import claim_port

SMOKE = ("run", "smollm2-135m", "--profile", "smoke")


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose only container engine is the fake docker; returns its state's folder."""
    state = tmp_path / "docker"
    state.mkdir()
    (state / "images").write_text("tokenspeed-cpu\n")
    only_programs(tmp_path / "bin", monkeypatch)
    put_program(tmp_path / "bin", "docker", f'exec "{sys.executable}" -I -S "{fake_docker.__file__}" "$@"')
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    monkeypatch.delenv("TOKENSPEED_ENGINE")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    return state


@pytest.fixture
def stopped(docker: Path) -> Iterator[None]:
    """Ends the containers that a failed test left."""
    yield
    for path in docker.glob("*.pid"):
        if not path.with_suffix(".code").exists():
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue


def calls(docker: Path, verb: str) -> list[list[str]]:
    """The command lines that began with ``verb``."""
    lines = (docker / "calls").read_text().splitlines() if (docker / "calls").exists() else []
    return [call for call in map(json.loads, lines) if call[0] == verb]


def test_a_container_in_the_background(docker: Path, stopped: None, tokenspeed: Command, own_machine: Path) -> None:
    port = claim_port("127.0.0.1", 0)
    started = tokenspeed(*SMOKE, "--port", str(port), "--max-num-seqs", "2", "--detach")
    assert started.code == 0, started.out + started.err
    assert "engine    docker 29.1.0, image tokenspeed-cpu" in started.out
    assert started.out.endswith("  loading\nready: fake\n  curl\n  make top\n")
    (command,) = calls(docker, "run")
    image = command.index("tokenspeed-cpu")
    assert command[image + 1 :] == [*SMOKE[1:], "--max-num-seqs", "2", "--port", str(port)]
    assert "--rm" not in command

    told = tokenspeed("status")
    assert told.code == 0
    expected = f"http://127.0.0.1:{port}  smollm2-135m-smoke  RANDOM weights  container tokenspeed-{port} (docker)"
    assert expected in told.out
    assert tokenspeed(*SMOKE, "--port", str(port)).err.count(f"by smollm2-135m-smoke (container tokenspeed-{port}") == 1
    swap = tokenspeed(*SMOKE, "--replace")
    assert (swap.code, "whose port cannot be shared: tokenspeed stop" in swap.err) == (2, True)
    assert tokenspeed("stop", "--dry-run").out.endswith("nothing was stopped (dry run)\n")

    ended = tokenspeed("stop")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "stopped")
    assert calls(docker, "stop") == [["stop", "--time", "40", f"tokenspeed-{port}"]]
    assert "drained" in (docker / f"tokenspeed-{port}.log").read_text()
    assert tokenspeed("status").code == 1
    # Its log is kept, and the next start takes the name over.
    assert tokenspeed(*SMOKE, "--port", str(port), "--detach").code == 0


def test_a_container_that_ends_before_it_is_ready(docker: Path, stopped: None, tokenspeed: Command) -> None:
    (docker / "broken").touch()
    done = tokenspeed(*SMOKE, "--port", str(claim_port("127.0.0.1", 0)), "--detach")
    assert done.code == 2


def test_a_container_in_the_foreground(docker: Path, stopped: None, own_machine: Path) -> None:
    """Its phases are shown, Ctrl-C reaches it, and status and stop know it."""
    port = str(claim_port("127.0.0.1", 0))
    command = [sys.executable, "-m", "tokenspeed.cli", *SMOKE, "--port", port]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shown = "".join(iter(process.stdout.readline, "ready: fake\n"))
        assert "  loading\n" in shown
        (record,) = [json.loads(path.read_text()) for path in (own_machine / "run").glob("*.json")]
        assert (record["container"], record["pid"]) == (f"tokenspeed-{port}", process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().splitlines()[-1] == "drained"
        assert process.wait(30) == 0
    assert "--rm" in calls(docker, "run")[0]


def test_a_dry_run_prints_the_exact_command(docker: Path, tokenspeed: Command) -> None:
    done = tokenspeed(*SMOKE, "--dry-run")
    assert done.code == 0
    command = done.out.partition("command\n")[2].partition("nothing was started")[0]
    words = re.sub(r"\\\n", " ", command).split()
    assert words[:4] == ["docker", "run", "--name", "tokenspeed-8000"]
    assert words[-4:] == ["tokenspeed-cpu", *SMOKE[1:]]
    assert calls(docker, "run") == []


def test_without_its_image_it_runs_natively_and_says_how_to_build_it(docker: Path, tokenspeed: Command) -> None:
    (docker / "images").write_text("tokenspeed-nvidia\n")
    done = tokenspeed(*SMOKE, "--dry-run")
    assert "engine    native; no image tokenspeed-cpu on this machine (to build it: make image VENDOR=cpu)" in done.out
    assert done.out.count("tokenspeed run smollm2-135m --profile smoke") == 1
    asked = tokenspeed(*SMOKE, "--engine", "container")
    assert asked.code == 2
    assert "there is no image tokenspeed-cpu on this machine" in asked.err
    assert "make image VENDOR=cpu, or ENGINE=native" in asked.err


def test_a_container_without_an_engine(docker: Path, tokenspeed: Command, tmp_path: Path) -> None:
    (docker / "down").touch()
    assert "engine    native" in tokenspeed(*SMOKE, "--dry-run").out
    asked = tokenspeed(*SMOKE, "--engine", "container")
    assert asked.code == 2
    assert "docker is installed but does not work: Cannot connect to the Docker daemon" in asked.err
    assert "podman: not installed" in asked.err
    (tmp_path / "bin" / "docker").unlink()
    assert "docker: not installed" in tokenspeed(*SMOKE, "--engine", "container").err


def test_an_image_of_ones_own_is_asked_for_at_its_registry(docker: Path, tokenspeed: Command) -> None:
    done = tokenspeed(*SMOKE, "--image", "registry.example/tokenspeed:1", "--dry-run")
    assert "engine    native; no image registry.example/tokenspeed:1" in done.out
    (docker / "registry").write_text("registry.example/tokenspeed:1\n")
    done = tokenspeed(*SMOKE, "--image", "registry.example/tokenspeed:1", "--dry-run")
    assert "engine    docker pulls registry.example/tokenspeed:1" in done.out


def test_native_is_native_whatever_images_there_are(docker: Path, tokenspeed: Command) -> None:
    done = tokenspeed(*SMOKE, "--engine", "native", "--dry-run")
    assert "engine    native, as asked" in done.out
    assert not (docker / "calls").exists()


def test_an_engine_that_hangs_is_left_after_a_while(
    docker: Path, tokenspeed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenspeed.cli import containers

    monkeypatch.setattr(containers, "ASK_S", 0.2)
    put_program(tmp_path / "bin", "docker", "sleep 60")
    assert "engine    native" in tokenspeed(*SMOKE, "--dry-run").out
    assert "it did not answer within" in tokenspeed(*SMOKE, "--engine", "container").err
