"""The dashboard in a real terminal over a real server under load: the screen, the state and the scheduler agree."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, until
from terminal import Terminal, needs_tmux, tokenspeed

from tokenspeed.cli.ports import claim_port
from tokenspeed.launch.replay import Replayer
from tokenspeed.messages.snapshot import STATES
from tokenspeed.telemetry.journal import JournalReader

pytestmark = [pytest.mark.long, needs_tmux]

SHOWN_LETTERS = 15
"""Of the longest state, as the list of states shows it."""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "engine.journal"


@pytest.fixture
def admin() -> str:
    return f"http://127.0.0.1:{claim_port('127.0.0.1', 0)}"


@pytest.fixture
def server(journal: Path, admin: str) -> Iterator[RunningServer]:
    """A small random model in a pool that is too small for what the test asks."""
    flags = ("--profile", "smoke", "--max-model-len", "4096", "--max-num-seqs", "8", "--kv-cache-gb", "0.02")
    own = ("--journal", str(journal), "--admin-port", admin.rpartition(":")[2], "--drain-seconds", "0")
    with RunningServer("smollm2-135m", *flags, *own) as running:
        yield running


def ask(url: str, number: int, tokens: int) -> None:
    """A request; whatever becomes of it when the server ends is not this test's."""
    body = {"model": "smollm2-135m-smoke", "prompt": f"{number} " * 40, "max_tokens": tokens, "ignore_eos": True}
    try:
        httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    except httpx.HTTPError:
        return


def counts_on(screen: str) -> dict[str, int | None]:
    """The number beside each state; None for a dash."""
    found: dict[str, int | None] = {}
    for name in STATES:
        match = re.search(rf"\d {name[:SHOWN_LETTERS]}\S*\s+([\d,]+|–)", screen)
        assert match is not None, f"{name} is not on the screen:\n{screen}"
        found[name] = None if match[1] == "–" else int(match[1].replace(",", ""))
    return found


def test_screen_state_and_scheduler_agree(server: RunningServer, journal: Path, admin: str, tmp_path: Path) -> None:
    clients = [threading.Thread(target=ask, args=(server.url, number, 4_000), daemon=True) for number in range(12)]
    for client in clients:
        client.start()

    def snapshot() -> dict[str, Any]:
        return dict(server.state()["snapshot"] or {})

    until(lambda: snapshot().get("running", 0) > 0 and snapshot()["waiting"] > 0, "some run and some wait")
    with Terminal(tokenspeed("top", "--url", server.url), tmp_path, size=(100, 30)) as terminal:
        terminal.shows("Decoding")
        assert httpx.post(f"{admin}/pause_generation", json={"mode": "in_place"}, timeout=30).status_code == 200
        until(lambda: snapshot()["paused"], "the engine is paused")
        terminal.shows("ENGINE PAUSED")
        screen = terminal.shows(lambda text: counts_on(text) == snapshot()["states"])
        state = snapshot()
        assert state["running"] > 0
        assert state["waiting"] > 0
        replayer = Replayer(JournalReader(journal))
        for _ in replayer.calls():
            pass
        own = replayer.scheduler.snapshot()
        counts = [None if count < 0 else count for count in own.states.tolist()]
        assert dict(zip(STATES, counts, strict=True)) == state["states"] == counts_on(screen)
        blocks = [(group.held, group.cached, group.free) for group in own.groups]
        assert [(group["held"], group["cached"], group["free"]) for group in state["groups"]] == blocks
        assert f"{state['running']} running, {state['waiting']} waiting" in screen
        terminal.press("q")
        assert terminal.ended() == 0
    httpx.post(f"{admin}/continue_generation", json={}, timeout=30)


def test_a_journal_is_watched_in_a_terminal(server: RunningServer, journal: Path, tmp_path: Path) -> None:
    ask(server.url, 0, 40)
    server.stop()
    with Terminal(tokenspeed("replay", str(journal), "--watch"), tmp_path, size=(100, 30)) as terminal:
        terminal.shows("round 1 of ")
        terminal.press("Right", "Right")
        terminal.shows("round 3 of ")
        terminal.press("Left")
        terminal.shows("round 2 of ")
        terminal.press("End")
        whole = terminal.shows(lambda text: (found := re.search(r"round ([\d,]+) of \1", text)) and found)
        assert counts_on(whole)["Finished"] is not None
        terminal.press("q")
        assert terminal.ended() == 0
