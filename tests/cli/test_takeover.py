"""A recipe swap on a running server: another model takes the port over, no stream is dropped, nobody is refused."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, run_cli, until

from tokenspeed.cli.ports import claim_port
from tokenspeed.launch.serve import bind

SMALL = ("--max-num-seqs", "8", "--kv-cache-gb", "0.05")
OLD, NEW = "smollm2-135m-smoke", "kimi-k2.5-smoke"


@pytest.fixture
def old(own_machine: Path) -> Iterator[RunningServer]:
    """The server whose place is taken."""
    with RunningServer("smollm2-135m", "--profile", "smoke", *SMALL) as server:
        yield server


class Clients(threading.Thread):
    """Streams one answer after the other, of whichever model is served; each on a connection of its own.

    ``served`` counts whole streams by model; ``broken`` says what went wrong with any.
    """

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__()
        self._url = url
        self._tokens = tokens
        self.stopping = threading.Event()
        self.served = {OLD: 0, NEW: 0}
        self.broken: list[str] = []

    def run(self) -> None:
        model = OLD
        while not self.stopping.is_set():
            try:
                status, whole = self._stream(model)
            except httpx.HTTPError as error:
                self.broken.append(f"{model}: {error!r}")
                return
            if status == 200 and whole:
                self.served[model] += 1
            elif status == 404 and model == OLD:
                model = NEW
            else:
                self.broken.append(f"{model}: status {status}, whole {whole}")
                return

    def _stream(self, model: str) -> tuple[int, bool]:
        body = {"model": model, "prompt": "x", "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
            lines = list(response.iter_lines())
            return response.status_code, "data: [DONE]" in lines


def swap(*options: str) -> subprocess.CompletedProcess[str]:
    return run_cli("run", "kimi-k2.5", *SMALL, *options, "--detach")


@pytest.fixture
def replaced() -> Iterator[None]:
    """Ends the new server."""
    yield
    run_cli("stop")


def test_the_new_model_takes_the_port_over_and_no_stream_is_dropped(
    old: RunningServer, replaced: None, own_machine: Path
) -> None:
    # The long streams keep the old server while it drains; meanwhile each of the short ones is a new connection. There
    # are several long ones of different lengths, so that not all of them happen to end in the moment of the swap.
    short, *long = all_clients = [Clients(old.url, tokens) for tokens in (4, 1500, 1650, 1830, 2040, 2280)]
    for clients in all_clients:
        clients.start()
    try:
        until(lambda: short.served[OLD], "the old model answers")
        # A successor that fails in its engine, when it has the socket already, leaves the old one alone.
        failed = run_cli("run", "kimi-k2.5", *SMALL, "--replace", "--set", "kernels.gemm.linear=no_such_kernel")
        assert failed.returncode == 2
        assert "no_such_kernel" in failed.stdout + failed.stderr
        assert run_cli("status").stdout.count(OLD) == 1
        done = swap("--replace")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"ready: {NEW} at {old.url}/v1" in done.stdout
        until(lambda: short.served[NEW] > 20 or short.broken, "the new model answers")
        # The long stream that was open on the old one ends, and the next is the new one's.
        until(lambda: old.process.poll() is not None or any(each.broken for each in long), "the old one ends")
    finally:
        for clients in all_clients:
            clients.stopping.set()
            clients.join()
    assert not any(clients.broken for clients in all_clients), [clients.broken for clients in all_clients]
    assert all(clients.served[OLD] > 0 for clients in long)
    assert old.process.wait(60) == 0
    assert "finishing" in old.output, "a stream was open when the old one retired"
    (record,) = [json.loads(path.read_text()) for path in (own_machine / "run").glob("*.json")]
    assert record["name"] == NEW
    assert f"retiring {OLD}" in (own_machine / "logs" / f"{record['port']}.log").read_text()


@pytest.mark.long
def test_where_there_is_room_for_one_requests_wait(old: RunningServer, replaced: None) -> None:
    """The old one ends before the new one loads; a request of that time is answered by the new one."""
    waiting: list[int] = []

    def ask() -> None:
        until(lambda: old.process.poll() is not None, "the old one ended")
        body = {"model": NEW, "prompt": "x", "max_tokens": 2}
        answer = httpx.post(f"{old.url}/v1/completions", json=body, timeout=60, trust_env=False)
        waiting.append(answer.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    done = swap("--replace-after")
    asking.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert waiting == [200]


def test_nothing_to_replace_is_a_plain_start(own_machine: Path) -> None:
    done = run_cli("run", "kimi-k2.5", "--replace", "--dry-run")
    assert done.returncode == 0
    assert "so there is nothing to replace" in done.stdout


def test_a_second_start_on_the_port_of_one_that_just_ended(own_machine: Path) -> None:
    """Connections in TIME_WAIT keep no port."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = first.accept()
            accepted.close()  # the server closes first, as it does when it ends: its side waits
            assert client.recv(1) == b""
    assert claim_port("127.0.0.1", port) == port
    bind("127.0.0.1", port).close()
