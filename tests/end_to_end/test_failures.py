"""What operators meet: killed engines, clients that go away, signals, and things that are not there."""

import contextlib
import json
import os
import random
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, run_cli, until

PROMPT = {"model": "smollm2-135m", "prompt": "Tell me a long story.", "ignore_eos": True, "stream": True}


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def test_a_killed_engine_ends_streams_with_an_error_and_comes_back(smollm2: Path) -> None:
    with RunningServer("smollm2-135m") as server:
        (pid,) = server.engine_pids()
        seen: list[str] = []
        with server.client.stream("POST", "/v1/completions", json={**PROMPT, "max_tokens": 4000}) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    seen.append(line.removeprefix("data: "))
                    if len(seen) == 5:
                        os.kill(pid, signal.SIGKILL)
        assert seen[-1] == "[DONE]"
        assert "SIGKILL" in json.loads(seen[-2])["error"]["message"]
        not_ready = server.client.get("/ready")
        assert not_ready.status_code == 503 and "SIGKILL" in not_ready.text
        assert server.client.get("/live").status_code == 200
        until(lambda: server.client.get("/ready").status_code == 200, "the engine is ready again")
        answer = server.client.post("/v1/completions", json={"model": "smollm2-135m", "prompt": "Hi", "max_tokens": 3})
        assert answer.status_code == 200
        assert server.engine_pids() != [pid]


def test_an_engine_dies_with_its_parent(smollm2: Path) -> None:
    with RunningServer("smollm2-135m") as server:
        (pid,) = server.engine_pids()
        server.process.kill()
        server.process.wait()
        until(lambda: not Path(f"/proc/{pid}").exists(), "the engine is gone too")


def test_sigterm_finishes_open_streams_and_refuses_new_work(smollm2: Path) -> None:
    with RunningServer("smollm2-135m") as server:
        lines: list[str] = []

        def read() -> None:
            with server.client.stream("POST", "/v1/completions", json={**PROMPT, "max_tokens": 300}) as response:
                lines.extend(events(response))

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: server.state()["snapshot"]["running"] == 1, "the stream runs")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "finishing 1 stream " in server.output, "it says that it drains")
        reader.join(60)
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0


def test_a_second_sigterm_forces_and_the_exit_status_tells(smollm2: Path) -> None:
    asked = {**PROMPT, "max_tokens": 8000}
    with (
        RunningServer("smollm2-135m") as server,
        server.client.stream("POST", "/v1/completions", json=asked) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "finishing 1 stream " in server.output, "it says that it drains")
        refused = httpx.post(f"{server.url}/v1/completions", json={**PROMPT, "max_tokens": 1})
        assert refused.status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 1
        with contextlib.suppress(httpx.RemoteProtocolError):  # cut in mid-stream, whichever side notices first
            *_, last = lines
            assert last == "data: [DONE]"


def test_sixty_four_streams_with_aborts_and_a_small_pool_all_end(smollm2: Path) -> None:
    # 22.5 KiB a token: this pool holds 23 blocks of 64 tokens for 64 streams, of which those that stay want 4 each.
    flags = ("--kv-cache-gb", "0.033", "--max-num-seqs", "32", "--max-model-len", "256", "--admin-port", "0")
    with RunningServer("smollm2-135m", *flags) as server:
        outcomes: dict[int, str] = {}

        def one(index: int) -> None:
            chance = random.Random(index)
            words = " ".join(chance.choice(["sea", "moon", "stone", "river", "light"]) for _ in range(40))
            # Of undeclared length: one block is reserved, so a full pool has to take blocks back. They end soon
            # after 170 tokens, at the first vowel.
            ends = {"min_tokens": 170, "stop": ["a", "e", "o"]}
            body = {"model": "smollm2-135m", "prompt": words, "stream": True, "seed": index, **ends}
            leave = chance.randrange(1, 40) if index % 2 == 0 else None
            read = 0
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=180) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    read += line.startswith("data: ")
                    if leave is not None and read > leave:
                        outcomes[index] = "left"
                        return
                    if line == "data: [DONE]":
                        outcomes[index] = "done"

        threads = [threading.Thread(target=one, args=(index,)) for index in range(64)]
        paused = {"mode": "in_place"}  # until all are there, or those of a slow machine would hardly meet
        assert httpx.post(f"{server.admin}/pause_generation", json=paused).status_code == 200
        for thread in threads:
            thread.start()
        until(lambda: server.state()["snapshot"]["waiting"] == 64, "all streams wait")
        assert httpx.post(f"{server.admin}/continue_generation").status_code == 200
        for thread in threads:
            thread.join(240)
        assert len(outcomes) == 64
        assert [outcomes[index] for index in range(64) if index % 2] == ["done"] * 32

        def idle() -> dict[str, object] | None:
            snapshot = server.state()["snapshot"]
            return snapshot if not snapshot["has_work"] else None

        snapshot = until(idle, "everything ended")
        (group,) = snapshot["groups"]
        assert group["held"] == 0 and group["cached"] + group["free"] == group["total"]
        assert snapshot["counters"]["retractions"] > 0
        assert snapshot["running"] == snapshot["waiting"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "smolm2-135m"), "smollm2-135m"),
        (("run", "smollm3"), "did you mean"),
        (("serve", "/nowhere/model.gguf"), "/nowhere/model.gguf"),
        (("serve", "smollm2-135m", "--max-num-seqs", "none"), "max-num-seqs"),
        (("serve", "smollm2-135m", "--max-model-len", "100000"), "8192"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    ended = run_cli(*arguments)
    assert ended.returncode == 2
    assert says in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_corrupt_gguf_is_named(tmp_path: Path, smollm2: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2.read_bytes()[:1_000_000])
    ended = run_cli("serve", str(broken), "--port", "0")
    assert ended.returncode == 2
    assert "broken.gguf" in ended.stderr and "Traceback" not in ended.stderr


def test_a_taken_port_is_named_before_anything_loads(smollm2: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_cli("serve", "smollm2-135m", "--port", str(port))
    assert ended.returncode == 2
    assert str(port) in ended.stderr and "--port" in ended.stderr and "load" not in ended.stdout


def test_broken_requests_are_answered_and_hurt_nobody(server: RunningServer) -> None:
    post = server.client.post
    broken = post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 400 and "JSON" in broken.json()["error"]["message"]
    unknown = post("/v1/completions", json={"model": "smollm2-135m", "prompt": "x", "temprature": 1})
    assert unknown.status_code == 400 and "temperature" in unknown.json()["error"]["message"]
    fine = post("/v1/completions", json={"model": "smollm2-135m", "prompt": "x", "max_tokens": 2})
    assert fine.status_code == 200
