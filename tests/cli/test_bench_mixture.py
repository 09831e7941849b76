"""What a long prompt does to streams: which phase a gap belongs to, on a clock that the tests move."""

import asyncio
import random
from typing import Any

import pytest
from virtual_time import in_virtual_time

from tokenspeed.cli.bench.answers import Answer, Request
from tokenspeed.cli.bench.mixture import (
    PHASE_CHUNKS,
    MixtureOutcome,
    MixtureWorkload,
    phase_figures,
    phase_of,
    run_mixture,
)

SPANS = [(10.0, 20.0), (30.0, 40.0)]


@pytest.mark.parametrize(
    ("gap", "phase"),
    [
        ((2, 3), None),  # the streams' own prompts are still computed
        ((5, 6), "before"),
        ((9, 10), "before"),
        ((9, 11), "during"),
        ((9, 45), "during"),
        ((19, 21), "during"),
        ((20, 30), None),
        ((39, 41), "during"),
        ((40, 41), "after"),
    ],
)
def test_the_phase_of_a_gap(gap: tuple[float, float], phase: str | None) -> None:
    assert phase_of(*gap, 4, SPANS) == phase
    assert phase_of(5, 6, 4, []) == "before"


class FakeServer:
    """Streams get ``together`` chunks each 0.1 s, or each 1 s while a long prompt is computed, which takes 5 s."""

    def __init__(self, together: int = 1) -> None:
        self.together = together
        self.endpoint = self
        self.prefilling = 0
        self.fails = ""
        self.sent: list[int] = []

    def prompt(self, source: random.Random, tokens: int) -> list[int]:
        return [1] * tokens

    def request(self, prompt: list[int], tokens: int, number: int) -> Request:
        return Request(path="prompt" if tokens == 1 else "stream", payload=bytes(tokens), conversation=number)

    async def send(self, request: Request, scheduled: float | None = None, watch: Any = None) -> Answer:
        now = asyncio.get_running_loop().time
        answer = Answer(now(), now())
        self.sent.append(len(request.payload))
        if request.path == "prompt":
            self.prefilling += 1
            await asyncio.sleep(5)
            self.prefilling -= 1
            answer.arrivals.append(now())
        else:
            await asyncio.sleep(request.conversation)  # the streams do not begin together
            for _ in range(len(request.payload)):
                await asyncio.sleep(1 if self.prefilling else 0.1)
                answer.arrivals += [now()] * self.together
                watch(answer)
        answer.error = "status 500" if request.path == self.fails else ""
        answer.ended = now()
        return answer


def run(workload: MixtureWorkload, server: FakeServer, stop_at: float | None = None) -> MixtureOutcome:
    async def work() -> MixtureOutcome:
        stop = asyncio.Event()
        if stop_at is not None:
            asyncio.get_running_loop().call_later(stop_at, stop.set)
        return await run_mixture(workload, server, random.Random(1), stop)  # type: ignore[arg-type]

    return in_virtual_time(work())


def test_streams_are_watched_before_during_and_after() -> None:
    outcome = run(MixtureWorkload(4, 3000, 2, 32, 5000), FakeServer())
    assert outcome.whole
    assert len(outcome.prompts) == 2 and len(outcome.streams) == 4
    # The last stream began after 3 s and had its first token 0.1 s later.
    assert outcome.steady == pytest.approx(3.1)
    assert outcome.spans[0][0] == pytest.approx(3.1 + PHASE_CHUNKS * 0.1)
    assert [end - begin for begin, end in outcome.spans] == pytest.approx([5, 5])
    before, during, after = phase_figures(outcome)
    assert [phase.phase for phase in (before, during, after)] == ["before", "during", "after"]
    assert before.itl_ms.p99 == pytest.approx(100) and after.itl_ms.p99 == pytest.approx(100)
    assert during.itl_ms.p99 == pytest.approx(1000)
    assert before.itl_ms.count >= 4 * (PHASE_CHUNKS - 1)
    assert before.tokens_per_s == pytest.approx(40, rel=0.05)
    assert (during.seconds, during.tokens_per_s) == (pytest.approx(10), pytest.approx(4, rel=0.15))


def test_chunks_that_come_together_all_count() -> None:
    outcome = run(MixtureWorkload(2, 3000, 1, 32, 5000), FakeServer(together=4))
    assert outcome.steady == pytest.approx(1.1)
    assert outcome.spans[0][0] == pytest.approx(1.1 + PHASE_CHUNKS / 4 * 0.1)


def test_short_streams_are_asked_again_until_the_end() -> None:
    server = FakeServer()
    outcome = run(MixtureWorkload(2, 3000, 1, 32, 10), server)
    assert outcome.whole
    assert server.sent.count(10) > 8
    assert all(len(answer.arrivals) == 10 for answer in outcome.streams[:-2])


@pytest.mark.parametrize("fails", ["prompt", "stream"])
def test_a_failure_ends_it(fails: str) -> None:
    server = FakeServer()
    server.fails = fails
    outcome = run(MixtureWorkload(2, 3000, 1, 32, 10), server)
    assert not outcome.whole
    assert [answer.error for answer in (*outcome.prompts, *outcome.streams) if answer.error]
    assert phase_figures(outcome)[0].phase == "before"


def test_an_interruption_keeps_what_streams_had() -> None:
    outcome = run(MixtureWorkload(2, 3000, 1, 32, 5000), FakeServer(), stop_at=6)
    assert not outcome.whole and outcome.prompts == []
    assert [phase.phase for phase in phase_figures(outcome)] == ["before"]
    assert outcome.ended == 6
