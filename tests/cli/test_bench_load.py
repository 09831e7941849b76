"""When requests are sent and what their times count from, on a clock that the tests move."""

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import in_virtual_time

from tokenspeed.cli.bench.answers import Answer, Request
from tokenspeed.cli.bench.load import Load, Outcome, arrival_times, run_load
from tokenspeed.cli.bench.statistics import summarize
from tokenspeed.cli.records import ServerError


class Talk:
    """A conversation of ``turns`` requests, which notes what it was told of the answers."""

    def __init__(self, number: int, turns: int = 1) -> None:
        self._turns = turns
        self._number = number
        self.seen: list[Answer] = []

    async def next(self, last: Answer | None) -> Request | None:
        if last is not None:
            self.seen.append(last)
        turn = len(self.seen)
        return None if turn == self._turns else Request(path="/", payload=b"", conversation=self._number, turn=turn)


class Server:
    """Answers with ``tokens`` tokens, the first after ``first`` seconds, each further one after ``each``.

    ``width`` requests are worked on at the same time, the others wait.
    """

    def __init__(self, first: float = 1.0, each: float = 0.5, tokens: int = 3, width: int = 1000) -> None:
        self._first, self._each, self._tokens = first, each, tokens
        self._room = asyncio.Semaphore(width)
        self.sent: list[float] = []
        self.fails: Callable[[Request], bool] = lambda request: False

    async def send(self, request: Request, scheduled: float | None) -> Answer:
        now = asyncio.get_running_loop().time
        self.sent.append(now())
        answer = Answer(now() if scheduled is None else scheduled, now(), turn=request.turn)
        async with self._room:
            for number in range(self._tokens):
                await asyncio.sleep(self._each if number else self._first)
                answer.arrivals.append(now())
        if self.fails(request):
            answer.error = "status 500"
        answer.ended = now()
        return answer


def talks(count: int | None, turns: int = 1) -> "itertools.chain[Talk]":
    numbers = itertools.count() if count is None else range(count)
    return itertools.chain(Talk(number, turns) for number in numbers)


def run(load: Load, server: Server, conversations: "itertools.chain[Talk]", stop_at: float | None = None) -> Outcome:
    async def work() -> Outcome:
        stop = asyncio.Event()
        if stop_at is not None:
            asyncio.get_running_loop().call_later(stop_at, stop.set)
        return await run_load(load, conversations, server.send, stop, random.Random(1))

    return in_virtual_time(work())


def test_a_closed_loop_keeps_so_many_open() -> None:
    server = Server()
    outcome = run(Load(concurrency=3), server, talks(8))
    # Each request takes two seconds: three at 0, three at 2, the last two at 4.
    assert server.sent == [0, 0, 0, 2, 2, 2, 4, 4]
    summary = summarize(outcome, load="3 at once", concurrency=3)
    assert (summary.completed, summary.peak_concurrency, summary.seconds) == (8, 3, 6)
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (8 / 6, 24 / 6)
    assert (summary.ttft_ms.p50, summary.tpot_ms.p50, summary.itl_ms.max, summary.e2e_ms.p99) == (1000, 500, 500, 2000)
    assert summary.tokens_per_s_per_user == 2
    assert summary.itl_ms.count == 16


def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = Server()
    outcome = run(Load(rate=2, arrivals="constant"), server, talks(6))
    assert server.sent == [0, 0.5, 1, 1.5, 2, 2.5]
    summary = summarize(outcome, load="2/s", rate=2)
    assert summary.peak_concurrency == 4
    assert summary.seconds == 4.5


def test_waiting_counts_from_when_a_request_was_due() -> None:
    """Coordinated omission: a server that does one at a time makes later requests wait, and that is its time."""
    outcome = run(Load(rate=1, arrivals="constant"), Server(width=1), talks(4))
    assert [answer.first_token_s for answer in outcome.answers] == [1, 2, 3, 4]


def test_a_client_that_is_late_says_so_and_does_not_flatter_the_server() -> None:
    class Slow(Talk):
        async def next(self, last: Answer | None) -> Request | None:
            await asyncio.sleep(1.5)  # making the request takes longer than there is between two
            return await super().next(last)

    outcome = run(Load(rate=1, arrivals="constant"), Server(), itertools.chain(Slow(n) for n in range(3)))
    assert [answer.sent - answer.scheduled for answer in outcome.answers] == [1.5, 2, 2.5]
    assert [answer.first_token_s for answer in outcome.answers] == [2.5, 3, 3.5]
    assert [answer.whole_s for answer in outcome.answers] == [3.5, 4, 4.5]
    summary = summarize(outcome, load="1/s", rate=1)
    assert summary.client_limited == "it sent 1 % of the requests 2,490 ms late or more"
    assert summarize(outcome, load="3 at once", concurrency=3).client_limited == ""
    assert summarize(outcome, load="", concurrency=3, client_cpu=0.9).client_limited == "it took 90% of a core"


def test_nothing_begins_after_the_time_is_over() -> None:
    server = Server()
    assert len(run(Load(concurrency=2, duration_s=3), server, talks(None)).answers) == 4
    assert server.sent == [0, 0, 2, 2]
    server = Server()
    assert len(run(Load(rate=1, arrivals="constant", duration_s=3), server, talks(None)).answers) == 3
    assert server.sent == [0, 1, 2]
    # A conversation is left at the turn that ends after it.
    assert len(run(Load(concurrency=1, duration_s=3), Server(), talks(1, turns=9)).answers) == 2


def test_turns_follow_each_other_and_count_for_themselves() -> None:
    talk = Talk(0, turns=3)
    outcome = run(Load(rate=1, arrivals="constant"), Server(), itertools.chain([talk]))
    assert [(answer.turn, answer.sent, answer.scheduled) for answer in outcome.answers] == [
        (0, 0, 0),
        (1, 2, 2),
        (2, 4, 4),
    ]
    assert talk.seen == outcome.answers


def test_an_interruption_keeps_what_was_seen_and_counts_what_was_open() -> None:
    outcome = run(Load(concurrency=3), Server(), talks(None), stop_at=5)
    assert (len(outcome.answers), outcome.cut_off, outcome.ended) == (6, 3, 5)
    outcome = run(Load(rate=1, arrivals="constant"), Server(), talks(None), stop_at=2.5)
    assert (len(outcome.answers), outcome.cut_off) == (1, 2)


def test_failures_are_counted_apart() -> None:
    server = Server()
    server.fails = lambda request: request.conversation == 1
    summary = summarize(run(Load(concurrency=1), server, talks(3)), load="", concurrency=1)
    assert (summary.completed, summary.errors) == (2, {"status 500": 1})
    assert summary.output_tokens == 6
    assert summary.ttft_ms.count == 2


def test_an_error_of_the_client_comes_out_as_it_is() -> None:
    class Broken(Talk):
        async def next(self, last: Answer | None) -> Request | None:
            raise ServerError("no more tokens")

    for load in (Load(concurrency=2), Load(rate=5)):
        with pytest.raises(ServerError, match="no more tokens"):
            run(load, Server(), itertools.chain(Broken(n) for n in range(3)))


@given(rate=st.floats(0.01, 1000), burst=st.integers(1, 20), seed=st.integers())
def test_arrivals_never_go_back(rate: float, burst: int, seed: int) -> None:
    for kind in ("poisson", "constant", "burst"):
        times = list(itertools.islice(arrival_times(kind, rate, burst, random.Random(seed)), 50))
        assert times == sorted(times)
        assert times[0] >= 0
        again = itertools.islice(arrival_times(kind, rate, burst, random.Random(seed)), 50)
        assert times == list(again)


def test_arrivals_have_their_rate() -> None:
    for kind in ("poisson", "constant", "burst"):
        times = list(itertools.islice(arrival_times(kind, 50, 10, random.Random(3)), 20_000))
        assert len(times) / times[-1] == pytest.approx(50, rel=0.03)
    gaps = [
        b - a
        for a, b in itertools.pairwise(itertools.islice(arrival_times("poisson", 50, 1, random.Random(4)), 20_000))
    ]
    mean = sum(gaps) / len(gaps)
    # The mean of exponential gaps is their standard deviation.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.03)
    assert list(itertools.islice(arrival_times("burst", 2, 3, random.Random(5)), 7)) == [0, 0, 0, 1.5, 1.5, 1.5, 3]
