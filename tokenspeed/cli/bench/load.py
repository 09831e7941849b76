"""When requests are sent: so many at once (closed loop), or at times that do not wait for answers (open loop)."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenspeed.cli.bench.answers import Answer, Request

Arrivals = Literal["poisson", "constant", "burst"]
Send = Callable[[Request, float | None], Awaitable[Answer]]
"""Sends a request that was due at a time (None: now)."""


class Conversation(Protocol):
    """Requests of which each may depend on the answer before."""

    async def next(self, last: Answer | None) -> Request | None:
        """The first request for None, the next one after an answer; None where it is over."""


@dataclass
class Load:
    """How much is sent; one of ``concurrency`` and ``rate`` is given.

    Attributes:
        concurrency: conversations at once.
        rate: conversations that begin each second.
        arrivals: how these are spread.
        burst: how many come at the same moment, with bursts.
        duration_s: no request begins later; None: as long as there are conversations.
    """

    concurrency: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    burst: int = 8
    duration_s: float | None = None

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.concurrency} at once" if self.concurrency is not None else f"{self.rate:g}/s"


@dataclass
class Outcome:
    """What was seen of one load; times on the loop's clock.

    Attributes:
        answers: of the requests that ended, well or not.
        cut_off: requests that were open when the measuring was interrupted.
    """

    began: float
    ended: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    cut_off: int = 0


def arrival_times(arrivals: Arrivals, rate: float, burst: int, source: random.Random) -> Iterator[float]:
    """Seconds from the beginning at which requests are due, without end; ``rate`` of them a second on the average.

    "poisson": the gaps are exponential, as those of many independent users. "constant": equal gaps. "burst": so many
    at the same moment, then a pause.
    """
    at, count = 0.0, 0
    while True:
        if arrivals == "poisson":
            at += source.expovariate(rate)
        else:
            at = count / rate if arrivals == "constant" else count // burst * burst / rate
        count += 1
        yield at


async def run_load(
    load: Load, conversations: Iterator[Conversation], send: Send, stop: asyncio.Event, source: random.Random
) -> Outcome:
    """Sends until the conversations or the time are over, or ``stop`` is set, which cuts off what is open."""
    now = asyncio.get_running_loop().time
    runner = _Runner(load, send, Outcome(now()))
    work = runner.closed(conversations) if load.rate is None else runner.open(conversations, source)
    await until_stopped(work, stop)
    runner.outcome.cut_off = runner.open_requests
    runner.outcome.ended = now()
    return runner.outcome


async def until_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Runs ``work`` to its end, or cancels it once ``stop`` is set. Raises what it raises, of a group the first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if task.cancelled():
        return
    try:
        task.result()
    except ExceptionGroup as group:  # the first of the users' errors is as good as all of them
        raise group.exceptions[0] from None


class _Runner:
    def __init__(self, load: Load, send: Send, outcome: Outcome) -> None:
        self._load = load
        self._send = send
        self._now = asyncio.get_running_loop().time
        self.outcome = outcome
        self.open_requests = 0

    async def closed(self, conversations: Iterator[Conversation]) -> None:
        """Each of ``concurrency`` users takes the next conversation when one is over."""
        assert self._load.concurrency is not None

        async def user() -> None:
            while not self._late():
                conversation = next(conversations, None)
                if conversation is None:
                    return
                await self._talk(conversation, await conversation.next(None), None)

        async with asyncio.TaskGroup() as users:
            for _ in range(self._load.concurrency):
                users.create_task(user())

    async def open(self, conversations: Iterator[Conversation], source: random.Random) -> None:
        """Each conversation begins when it is due, whatever became of those before."""
        assert self._load.rate is not None
        times = arrival_times(self._load.arrivals, self._load.rate, self._load.burst, source)
        async with asyncio.TaskGroup() as users:
            for conversation, at in zip(conversations, times, strict=False):
                if self._load.duration_s is not None and at >= self._load.duration_s:
                    return
                first = await conversation.next(None)  # made before it is due: that is not the server's time
                due = self.outcome.began + at
                await asyncio.sleep(max(0.0, due - self._now()))
                users.create_task(self._talk(conversation, first, due))

    async def _talk(self, conversation: Conversation, request: Request | None, due: float | None) -> None:
        while request is not None:
            self.open_requests += 1
            answer = await self._send(request, due)
            self.open_requests -= 1
            self.outcome.answers.append(answer)
            if self._late():
                return
            request, due = await conversation.next(answer), None

    def _late(self) -> bool:
        limit = self._load.duration_s
        return limit is not None and self._now() - self.outcome.began >= limit
