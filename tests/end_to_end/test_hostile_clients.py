"""Hostile clients against the real server: good requests are answered, nothing is held, and memory stays flat."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, until

from scripts import hostile_clients
from scripts.hostile_clients import Target

CONNECTIONS = 1000
GOOD = 8
GROWTH_MB = 64
"""Memory that a third round of attacks may leave behind, in MB, in both processes together."""


@pytest.fixture(scope="module")
def attacked(smollm2: Path) -> Iterator[RunningServer]:
    flags = ("--max-model-len", "1024", "--kv-cache-gb", "0.1", "--admin-port", "0")
    with RunningServer("smollm2-135m", *flags) as server:
        yield server


async def attack(server: RunningServer, admin: str, seed: int) -> Target:
    """Attacks until so many good requests were answered; an operator ends calls meanwhile, which harms no others."""
    target = Target.at(server.url, "smollm2-135m", seed)
    stop = asyncio.Event()

    async def aborts() -> None:
        body = {"model": "smollm2-135m", "prompt": "x", "ignore_eos": True, "max_tokens": 900}
        async with httpx.AsyncClient(timeout=60) as client:
            while not stop.is_set():
                asked = asyncio.create_task(
                    client.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "gone"})
                )
                while not asked.done():
                    await client.post(f"{admin}/abort_request", json={"rid": "gone"})
                    await asyncio.wait([asked], timeout=0.2)
                assert asked.result().json()["error"]["code"] == "aborted"

    others = [asyncio.create_task(hostile_clients.attack(target, stop, CONNECTIONS)), asyncio.create_task(aborts())]
    try:
        times = await hostile_clients.good_requests(target, lambda done: done >= GOOD)
        assert len(times) == GOOD
    finally:
        stop.set()
        await asyncio.gather(*others)
    return target


def memory_mb(server: RunningServer) -> float:
    """What the server's processes hold for themselves."""
    pids = [server.process.pid, *server.engine_pids()]
    status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(re.findall(r"RssAnon:\s+(\d+) kB", text)[0]) for text in status) / 1024


@pytest.mark.long
def test_a_hostile_while(attacked: RunningServer) -> None:
    held = []
    for seed in (1, 2, 3):
        target = asyncio.run(attack(attacked, attacked.admin, seed))
        assert {status for _, status in target.statuses} <= {200, 400, 404, 413, 503}, target.statuses
        # only a constraint may be told to come again: its compilers are busy
        assert {kind for kind, status in target.statuses if status == 503} <= {"endless constraints"}
        until(lambda: quiet(attacked), "no block is held")
        held.append(memory_mb(attacked))
    assert held[2] < held[1] + GROWTH_MB, held


def quiet(server: RunningServer) -> bool:
    state = server.state()
    groups = state["snapshot"]["groups"]
    return state["open_choices"] == 0 and all(group["held"] == 0 for group in groups) and bool(groups)
