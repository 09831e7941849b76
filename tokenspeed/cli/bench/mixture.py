"""The workload "mixture": what a long prompt does to those who are being answered meanwhile."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenspeed.cli.bench.answers import Answer, Request
from tokenspeed.cli.bench.load import until_stopped
from tokenspeed.cli.bench.statistics import Figures
from tokenspeed.cli.bench.workloads import Asker

Phase = Literal["before", "during", "after"]
PHASES: tuple[Phase, ...] = ("before", "during", "after")
PHASE_CHUNKS = 32
"""So many chunks of each decoder make up what is seen before the long prompts and after them."""


@dataclass(frozen=True)
class MixtureWorkload:
    """``decoders`` streams run; then ``prompts`` prompts of ``prompt_len`` tokens come, one after the other."""

    decoders: int
    prompt_len: int
    prompts: int
    input_len: int
    output_len: int

    @property
    def described(self) -> str:
        prompts = f"a prompt of {self.prompt_len} tokens comes"
        if self.prompts > 1:
            prompts = f"{self.prompts} prompts of {self.prompt_len} tokens come one after the other"
        return f"{self.decoders} streams of {self.output_len} tokens after {self.input_len}, while {prompts}"


@dataclass(frozen=True)
class PhaseFigures:
    """The streams in one phase."""

    phase: Phase
    seconds: float
    tokens_per_s: float
    itl_ms: Figures


@dataclass
class MixtureOutcome:
    """What was seen; times on the loop's clock.

    Attributes:
        steady: when the last stream had its first token: before that the streams' own prompts are computed.
        streams: answers of the decoders, also of those that were cut off at the end.
        prompts: answers to the long prompts.
        whole: whether the last phase was reached and ended.
    """

    began: float
    steady: float = 0.0
    ended: float = 0.0
    streams: list[Answer] = field(default_factory=list)
    prompts: list[Answer] = field(default_factory=list)
    whole: bool = False

    @property
    def spans(self) -> list[tuple[float, float]]:
        """From when each long prompt was sent to its first token."""
        return [(answer.sent, answer.arrivals[0]) for answer in self.prompts if answer.ok]


def phase_of(sooner: float, later: float, steady: float, spans: Sequence[tuple[float, float]]) -> Phase | None:
    """The phase of the time between two chunks: during a prompt if any of it is; None between two prompts, and before
    all streams run."""
    if any(sooner < end and later > begin for begin, end in spans):
        return "during"
    if not spans or later <= spans[0][0]:
        return "before" if sooner >= steady else None
    return "after" if sooner >= spans[-1][1] else None


def phase_figures(outcome: MixtureOutcome) -> list[PhaseFigures]:
    """The streams before, during and after the long prompts; phases that were not reached are left out."""
    spans = outcome.spans
    gaps: dict[Phase | None, list[tuple[float, float]]] = {}
    for answer in outcome.streams:
        for pair in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            gaps.setdefault(phase_of(*pair, outcome.steady, spans), []).append(pair)
    found = []
    for phase in PHASES:
        pairs = gaps.get(phase)
        if not pairs:
            continue
        arrived = len(pairs)
        seconds = max(later for _, later in pairs) - min(sooner for sooner, _ in pairs)
        if phase == "during":  # a gap that only reaches out of a prompt's time brought its chunk after it
            seconds = sum(end - begin for begin, end in spans)
            arrived = sum(any(begin < later <= end for begin, end in spans) for _, later in pairs)
        itl = Figures.of(later - sooner for sooner, later in pairs)
        found.append(PhaseFigures(phase, seconds, arrived / seconds if seconds > 0 else 0.0, itl))
    return found


async def run_mixture(
    workload: MixtureWorkload, asker: Asker, source: random.Random, stop: asyncio.Event
) -> MixtureOutcome:
    """Runs the phases one after the other; each begins when what was awaited has been seen, never by a clock."""
    now = asyncio.get_running_loop().time
    run = _Mixture(workload, asker, source, MixtureOutcome(now()))
    await until_stopped(run.phases(), stop)
    run.outcome.streams += [answer for answer in run.open.values() if answer.arrivals]
    run.outcome.ended = now()
    return run.outcome


class _Mixture:
    def __init__(self, workload: MixtureWorkload, asker: Asker, source: random.Random, outcome: MixtureOutcome) -> None:
        self._workload = workload
        self._asker = asker
        self._source = source
        self._progress = asyncio.Event()
        self._chunks = [0] * workload.decoders
        self.outcome = outcome
        self.open: dict[int, Answer] = {}
        """What each stream has of the answer it is at."""

    async def phases(self) -> None:
        """Streams alone, streams beside the prompts, streams alone again. Ends early where a request fails."""
        # Made beforehand: what is between two prompts is the server's time, not the client's.
        prompts = [self._request(self._workload.prompt_len, 1, number) for number in range(self._workload.prompts)]
        streams = [asyncio.create_task(self._stream(number)) for number in range(self._workload.decoders)]
        try:
            if not await self._each_gained(1):
                return
            self.outcome.steady = asyncio.get_running_loop().time()
            if not await self._each_gained(PHASE_CHUNKS):
                return
            for prompt in prompts:
                answer = await self._asker.endpoint.send(prompt)
                self.outcome.prompts.append(answer)
                if not answer.ok:
                    return
            self.outcome.whole = await self._each_gained(PHASE_CHUNKS)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)

    def _request(self, tokens: int, answer: int, number: int) -> Request:
        return self._asker.request(self._asker.prompt(self._source, tokens), answer, number)

    async def _stream(self, number: int) -> None:
        """Is answered again and again until it is cancelled or something fails."""
        seen = 0

        def watch(answer: Answer) -> None:
            nonlocal seen
            self.open[number] = answer
            self._chunks[number] += len(answer.arrivals) - seen
            seen = len(answer.arrivals)
            self._progress.set()

        while True:
            seen = 0
            request = self._request(self._workload.input_len, self._workload.output_len, number)
            answer = await self._asker.endpoint.send(request, None, watch)
            self.open.pop(number, None)
            self.outcome.streams.append(answer)
            if not answer.ok:
                self._progress.set()
                return

    async def _each_gained(self, count: int) -> bool:
        """Waits until every stream has got so many chunks more; False where one failed meanwhile."""
        goals = [chunks + count for chunks in self._chunks]
        while any(chunks < goal for chunks, goal in zip(self._chunks, goals, strict=True)):
            if any(not answer.ok for answer in self.outcome.streams):
                return False
            self._progress.clear()
            await self._progress.wait()
        return True
