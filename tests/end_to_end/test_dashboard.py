"""The dashboard in a real terminal, on a real server under load: the screen shows what the scheduler says."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, until
from terminal import Terminal, needs_tmux

pytestmark = [pytest.mark.long, needs_tmux]

POOL = ("--kv-cache-gb", "0.03", "--host-cache-gb", "0.1", "--max-model-len", "1024", "--max-num-seqs", "6")


@contextmanager
def watching(server: RunningServer, folder: Path) -> Iterator[Terminal]:
    """A terminal in which the dashboard looks at a server."""
    command = [sys.executable, "-m", "tokenspeed_tui", "--url", server.url, "--interval", "0.1"]
    with Terminal(command, folder) as terminal:
        yield terminal


def shows(terminal: Terminal, *words: str) -> str:
    """The screen, once it shows one of the words, wherever its lines break."""

    def any_of_them(screen: str) -> bool:
        text = " ".join(screen.replace("│", " ").split())
        return any(word in text for word in words)

    return terminal.shows(any_of_them)


@contextmanager
def load(server: RunningServer, admin: str, clients: int) -> Iterator[None]:
    """Clients that ask for long answers, one after the other; at the end all of it is aborted."""
    ended = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            while not ended.is_set():
                prompt = f"Client {number} tells a story. " * 12
                asked = {"model": server.model, "prompt": prompt, "max_tokens": 300, "ignore_eos": True}
                client.post("/v1/completions", json=asked)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for path, body in (("/continue_generation", {}), ("/abort_request", {"abort_all": True})):
            httpx.post(f"{admin}{path}", json=body, timeout=60).raise_for_status()
        for thread in threads:
            thread.join()


def counts(screen: str) -> dict[str, int]:
    """The count in every box of the drawn machine."""
    lines = screen.splitlines()
    found: dict[str, int] = {}
    for row, line in enumerate(lines):
        for name, number in re.findall(r"(Prefetching|Restoring|Retracted) +([\d,]+)", line):
            found.setdefault(name, int(number.replace(",", "")))
        for name in ("Submitted", "Prefilling", "PrefillDone", "Decoding", "Finishing", "Finished"):
            box = re.search(rf"│ ?{name} ?[│├]", line)
            if box is not None:
                inside = lines[row + 1][box.start() + 1 : box.end() - 1]
                found.setdefault(name, int(re.sub(r"\D", "", inside)))
    return found


def told_counts(state: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in state["snapshot"]["states"].items() if count is not None}


@pytest.fixture(scope="module")
def tight(smollm2: Path) -> Iterator[tuple[RunningServer, str]]:
    """A server whose pool is too small for its clients."""
    with RunningServer("smollm2-135m", *POOL, "--admin-port", "0") as server:
        yield server, server.admin


def test_the_screen_shows_the_counts_of_the_scheduler(tight: tuple[RunningServer, str], tmp_path: Path) -> None:
    """While the engine is paused nothing moves: the counts on the screen are those of the scheduler."""
    server, admin = tight
    with watching(server, tmp_path) as terminal, load(server, admin, clients=10):
        until(lambda: (server.state()["snapshot"] or {}).get("waiting"), "somebody waits")
        httpx.post(f"{admin}/pause_generation", json={"mode": "in_place"}).raise_for_status()
        screen = shows(terminal, "ENGINE PAUSED")
        assert "an operator paused the engine" in screen

        def equal() -> dict[str, int] | None:
            shown, told = counts(terminal.screen()), told_counts(server.state())
            return shown if shown == told else None

        held = until(equal, "the screen has the counts of the state")
        assert held["Submitted"] > 0 and held["Finished"] >= 0
        group = server.state()["snapshot"]["groups"][0]
        assert f"█ {group['held']} " in terminal.screen() and f"▒ {group['cached']} ·" in terminal.screen()


def test_what_requests_wait_for_is_named_with_its_knob(tight: tuple[RunningServer, str], tmp_path: Path) -> None:
    server, admin = tight
    with watching(server, tmp_path) as terminal, load(server, admin, clients=10):
        terminal.press("e")
        # Either the blocks are held, or they are reserved for the 300 tokens that each client declared.
        screen = shows(terminal, "raise kv.bytes (now 30.7 MiB)", "lower scheduler.headroom (now 4096)")
        assert "── Advice ──" in screen
        terminal.press("2")
        shows(terminal, "capacity: short by")
        terminal.press("Enter")
        shows(terminal, "place 1 of")
        assert "in the scheduler's words" in shows(terminal, "as the scheduler had it")


def test_a_server_that_dies_never_freezes_the_screen(smollm2: Path, tmp_path: Path) -> None:
    with RunningServer("smollm2-135m", "--max-model-len", "256") as server, watching(server, tmp_path) as terminal:
        shows(terminal, "live ok")
        server.process.kill()
        server.process.wait()
        shows(terminal, "no server answers")
        terminal.press("4")
        screen = shows(terminal, "ago ─")
        assert "── Rates ──" in screen and "smollm2-135m" in screen, "the last picture stays"
