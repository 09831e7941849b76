"""``tokenspeed demo``: within a minute requests wait, give way, come back and are explained, in a real terminal."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import run_cli, until
from terminal import Terminal, needs_tmux, tokenspeed

pytestmark = [pytest.mark.long, needs_tmux]


def record_of(cache: Path) -> dict[str, Any]:
    """What is on disk of the only server there is, once it is."""
    path = until(lambda: next((cache / "run").glob("*.json"), None), "the demo's server has a record", 90)
    return dict(json.loads(path.read_text()))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def cache(tmp_path: Path, smollm2: Path) -> Path:
    """A cache of its own for records and logs, with the weights of this user's."""
    own = tmp_path / "cache"
    own.mkdir()
    packages = next(parent for parent in smollm2.parents if parent.name == "packages")
    (own / "packages").symlink_to(packages)
    return own


def test_a_newcomer_sees_a_request_give_way_come_back_and_be_explained(cache: Path, tmp_path: Path) -> None:
    environment = {"TOKENSPEED_CACHE": str(cache), "TOKENSPEED_ENGINE": "native"}
    with Terminal(tokenspeed("demo"), tmp_path, environment=environment) as terminal:
        server = record_of(cache)
        url = f"http://127.0.0.1:{server['port']}"
        terminal.shows("Decoding", 90)

        def snapshot() -> dict[str, Any]:
            return dict(httpx.get(f"{url}/v1/internal/state", timeout=30).json()["snapshot"] or {})

        def gave_way_and_came_back() -> bool:
            counters = snapshot().get("counters", {})
            return bool(counters and counters["retractions"] > 0 and counters["restores"] > 0)

        until(gave_way_and_came_back, "a request was retracted and restored", 90)
        terminal.press("e")
        terminal.shows("retract", 30)
        terminal.press("Escape")
        rows = snapshot()["requests"]
        told = run_cli("explain", rows[0]["request_id"], "--url", url, environment=environment)
        assert told.returncode == 0, told.stderr
        assert "timeline" in told.stdout
        assert "why" in told.stdout
        terminal.press("Enter")
        terminal.shows("Why", 30)
        terminal.press("q")
        assert terminal.ended() == 0
    until(lambda: is_gone(server["pid"]), "the server ended with the dashboard")
    assert not list((cache / "run").glob("*.json"))


def test_everything_ends_with_the_terminal(cache: Path, tmp_path: Path) -> None:
    environment = {"TOKENSPEED_CACHE": str(cache), "TOKENSPEED_ENGINE": "native"}
    with Terminal(tokenspeed("demo"), tmp_path, environment=environment) as terminal:
        server = record_of(cache)
        terminal.shows("Decoding", 90)
        children = Path(f"/proc/{server['pid']}/task/{server['pid']}/children").read_text().split()
        assert children
    # Leaving the block closed the terminal: its program got SIGHUP, not a key.
    until(lambda: is_gone(server["pid"]), "the server ended with the terminal")
