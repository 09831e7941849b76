"""Clients that mean no good harm nobody else: the attackers of scripts/hostile_clients.py, over a scripted engine."""

import asyncio
from collections.abc import Iterable

import httpx
import pytest
from scripted_engine import MODEL, Submit, say
from served_thread import ServedThread

from scripts import hostile_clients, measure_attack
from scripts.hostile_clients import Target
from scripts.measure_attack import Attackers
from tokenspeed.messages import RequestOutput

CONNECTIONS = 200
GOOD = 40


def says_all(submit: Submit) -> Iterable[RequestOutput]:
    """As many tokens as were asked for, one a round."""
    return say(b"a" * submit.max_new_tokens, ends=False)(submit)


async def good_among_hostile(target: Target) -> list[float]:
    stop = asyncio.Event()
    attackers = asyncio.create_task(hostile_clients.attack(target, stop, CONNECTIONS))
    try:
        return await hostile_clients.good_requests(target, lambda done: done >= GOOD and len(target.statuses) > 3)
    finally:
        stop.set()
        await attackers


def test_good_requests_go_on_among_hostile_ones() -> None:
    with ServedThread(script=says_all) as served:
        target = Target.at(served.url, MODEL, seed=1)
        assert len(asyncio.run(good_among_hostile(target))) >= GOOD
        served.all_ended()
        statuses = {status for _, status in target.statuses}
        assert statuses <= {200, 400, 404, 413}, target.statuses
        assert 400 in statuses
        assert httpx.get(f"{served.url}/live").status_code == 200
        assert httpx.get(f"{served.url}/v1/internal/state").json()["open_choices"] == 0


def test_the_measurement_says_what_attackers_did_and_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted engine says of itself that it holds twenty blocks, whatever happens."""
    monkeypatch.setattr(measure_attack, "LET_GO_S", 0)
    with ServedThread(script=says_all) as served:
        target = Target.at(served.url, MODEL, seed=1)
        attackers = Attackers(served.url, MODEL, 1, "", connections=3, attacks=("odd_bodies",), nice=1)
        asyncio.run(measure_attack.compare(target, attackers, users=1, seconds=0.5, rounds=1))
        assert asyncio.run(measure_attack.held_afterwards(target)) == "0 choices and 20 blocks"
    assert set(target.tried) == {"odd_bodies"} and sum(target.statuses.values()) == target.tried["odd_bodies"]
    said = capsys.readouterr().out
    for part in ("quiet: ", "hostile: ", "company: ", " to quiet; p50 ", "attacks: ", "odd bodies: 400 x"):
        assert part in said
