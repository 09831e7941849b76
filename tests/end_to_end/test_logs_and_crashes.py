"""A server whose log nobody reads, and an engine that dies: what goes on, and what is left behind."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, run_cli, until

SMOKE = ("smollm2-135m", "--profile", "smoke", "--max-num-seqs", "2", "--kv-cache-gb", "0.02", "--threads", "1")
TOKEN = "hf_" + "Zz9" * 8


class UnreadServer:
    """`tokenspeed serve` with both outputs in one small pipe that is read until the server is ready, and no more."""

    def __init__(self, port: int, cache: Path) -> None:
        self._reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        command = [sys.executable, "-m", "tokenspeed.cli", "serve", *SMOKE, "--port", str(port), "--log-level", "debug"]
        environment = {**os.environ, "TOKENSPEED_CACHE": str(cache)}
        self.process = subprocess.Popen(command, stdout=writing, stderr=writing, env=environment)
        os.close(writing)
        self.read = b""
        self.client = httpx.Client(base_url=self._url(), timeout=60)

    def __enter__(self) -> "UnreadServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._reading)

    def _url(self) -> str:
        while (found := re.search(rb"ready: \S+ at (http://\S+)/v1\n", self.read)) is None:
            data = os.read(self._reading, 1 << 16)
            assert data, self.read.decode()
            self.read += data
        return found[1].decode()

    def pipe_is_full(self) -> bool:
        waiting = bytearray(4)
        fcntl.ioctl(self._reading, 0x541B, waiting)  # FIONREAD
        return int.from_bytes(waiting, sys.byteorder) > 4096 - 256

    def chat(self) -> int:
        body = {"model": "smollm2-135m-smoke", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        return self.client.post("/v1/chat/completions", json=body).status_code


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """Known failure 38, and a second start on the same port right after the end of the first."""
    with UnreadServer(0, tmp_path) as server:
        port = httpx.URL(server.client.base_url).port
        assert port is not None
        while not server.pipe_is_full():
            assert server.chat() == 200
        for _ in range(50):  # each leaves two lines or more
            assert server.chat() == 200
        (pid,) = engine_pids(server.process.pid)
        os.kill(pid, signal.SIGSEGV)  # dies with its stacks, which go where the log goes
        until(lambda: server.client.get("/ready").status_code == 503, "its end is known")
        until(lambda: server.client.get("/ready").status_code == 200, "the engine is back")
        assert server.chat() == 200
        (bundle,) = (tmp_path / "crashes").iterdir()
        assert "Segmentation fault" in (bundle / "traceback.txt").read_text()
        assert server.pipe_is_full()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    with UnreadServer(port, tmp_path) as again:
        assert again.chat() == 200


def engine_pids(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"tokenspeed.launch.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def crash(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "crash.json").read_text()))


@pytest.mark.long
def test_a_dying_engine_leaves_a_bundle_and_comes_back(cache: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("sk-the-operators-key\n")
    environment = {"TOKENSPEED_CACHE": str(cache), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}
    flags = (*SMOKE[1:], "--log-level", "debug", "--log-file", str(tmp_path / "server.log"))
    flags = (*flags, "--api-key-file", str(key_file), "--set", "env.SOME_TOKEN=very-secret-text")
    with RunningServer(SMOKE[0], *flags, environment=environment) as server:
        server.client.headers["Authorization"] = "Bearer sk-the-operators-key"
        asked = {"model": "smollm2-135m-smoke", "prompt": "a prompt that nobody may see", "max_tokens": 3}
        answer = server.client.post("/v1/completions", json=asked, headers={"X-Request-Id": "request-of-mine"})
        assert answer.status_code == 200
        until(lambda: server.state()["snapshot"] is not None, "the engine sent a snapshot")

        for number, (name, status) in enumerate({"SIGSEGV": -11, "SIGKILL": -9}.items(), 1):
            os.kill(server.engine_pids()[0], getattr(signal, name))
            found = until(lambda: bundle_told(server), "the bundle is told")
            assert crash(found)["signal"] == name and crash(found)["exit_status"] == status
            assert crash(found)["was_ready"] and name in crash(found)["cause"]
            assert (found / "traceback.txt").exists() == (name == "SIGSEGV")
            assert len(list((cache / "crashes").iterdir())) == number
            until(lambda: server.client.get("/ready").status_code == 200, "the engine is back")
        assert server.stop() == 0

    segv, kill = sorted((cache / "crashes").iterdir(), key=lambda folder: crash(folder)["exit_status"])
    stacks = (segv / "traceback.txt").read_text()
    assert "Segmentation fault" in stacks and "engine/loop.py" in stacks and "forward_thread.py" in stacks
    assert {file.name for file in kill.iterdir()} >= {"engine.log", "server.log", "config.json", "environment.json"}
    snapshot = json.loads((segv / "snapshot.json").read_text())
    assert snapshot["groups"] and snapshot["states"]
    assert "[request-of-mine]" in (segv / "engine.log").read_text()
    assert json.loads((segv / "config.json").read_text())["env"] == {"SOME_TOKEN": "***"}
    log = (tmp_path / "server.log").read_text()
    assert f"crash bundle: {segv}" in log and "Segmentation fault" in log and "engine DEBUG" in log

    report = tmp_path / "report.tar.gz"
    told = run_cli("env", "--bundle", str(report), environment=environment)
    assert told.returncode == 0, told.stderr
    with tarfile.open(report) as archive:
        packed = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        texts = {name: file.read().decode() for name, file in packed.items() if file is not None}
    assert (
        f"tokenspeed-report/crashes/{kill.name}/engine.log" in texts and "tokenspeed-report/environment.json" in texts
    )
    everything = log + server.output + "".join(texts.values())
    everything += "".join(file.read_text() for file in (cache / "crashes").rglob("*") if file.is_file())
    for secret in (TOKEN, "sk-the-operators-key", "very-secret-text", "nobody may see"):
        assert secret not in everything


def bundle_told(server: RunningServer) -> Path | None:
    answer = server.client.get("/ready")
    path = answer.json().get("crash_bundle") if answer.status_code == 503 else None
    return Path(path) if path else None
