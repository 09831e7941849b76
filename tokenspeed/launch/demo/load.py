"""Who asks the demo's engine: agents whose every turn sends all that was said, people with questions, long reports.

Everything is drawn from one seed and happens on the demo's clock, so two runs with one seed are the same run.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tokenspeed.launch.demo.answered import Answer, Answered
from tokenspeed.launch.demo.clock import DemoClock
from tokenspeed.launch.demo.device import END_TOKEN
from tokenspeed.messages import (
    PROTOCOL_VERSION,
    EngineInput,
    EngineMessage,
    EngineOutput,
    EngineSnapshot,
    Inspect,
    Inspected,
    RequestOutput,
    SamplingParameters,
    Submit,
)
from tokenspeed.messages.snapshot import EventSnapshot, RequestDetail, StateSnapshot

AGENTS = 16
SYSTEM_TOKENS, PROJECT_TOKENS, PROJECTS = 1024, 512, 3
"""All agents begin with the same instructions; those of a project share what is known of it, too."""
TURNS = (3, 8)
TOOL_TOKENS = (120, 800)
ANSWER_TOKENS = (60, 420)
THINKING_S = (0.5, 4.0)
UNDECLARED_LIMIT = 2048
"""Agents do not say how long an answer may get: the scheduler cannot reserve for it, and has to retract where the pool
ends."""

QUESTIONS_PER_S = 0.6
IMPATIENT = 0.15
"""The share of people who leave before the answer is whole."""
REPORT_EVERY_S = 9.0
REPORT_TOKENS = (3_000, 6_000)


EVENTS_KEPT = 64
WATCH_S = 3600.0


@dataclass
class _Agent:
    """One agent's session: what was said so far, and how many turns are left."""

    number: int
    project: int
    said: list[int] = field(default_factory=list)
    turn: int = 0
    turns: int = 0


class DemoLoad:
    """The frontend's end of the engine's wire: it asks, reads answers, and asks again.

    Attributes:
        ends: handle to the length of prompt and output at which a request's end token comes.
        horizon: up to this moment time may pass where nothing is to be done.
        snapshot: the engine's last one; None before the first.
        events: the newest that the snapshots brought.
        detail: the engine's last answer about a request.
        answered: what clients saw of the answers that ended lately.
    """

    def __init__(self, clock: DemoClock, seed: int) -> None:
        self.ends: dict[int, int] = {}
        self.horizon = 0.0
        self.snapshot: StateSnapshot | None = None
        self.events: deque[EventSnapshot] = deque(maxlen=EVENTS_KEPT)
        self.detail: RequestDetail | None = None
        self.answered = Answered()
        self._clock = clock
        self._random = random.Random(seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._events = 0
        self._handle = 0
        self._questions = 0
        self._reports = 0
        self._message = _empty()
        self._answers: dict[int, Answer] = {}
        for number in range(1, AGENTS + 1):
            agent = _Agent(number, number % PROJECTS)
            self._at(self._random.uniform(0.0, 3.0), partial(self._begin, agent))
        self._at(1.0, self._ask)
        self._at(4.0, self._report)

    @property
    def open(self) -> int:
        """Requests that wait for an end of their answer."""
        return len(self._answers)

    # The loop's channel.

    def receive(self, timeout_ms: int) -> list[EngineInput]:
        """What was asked up to now; where there is nothing, time passes until there is, or the timeout is over."""
        self._happen()
        if self._message == _empty() and timeout_ms:
            until = min(self._clock.now + timeout_ms / 1e3, self.horizon)
            self._clock.move_to(min([until, *(due for due, _, _ in self._due[:1])]))
            self._happen()
        message, self._message = self._message, _empty()
        return [message]

    def inspect(self, name: str) -> None:
        """Asks about one request; the answer comes at the end of the engine's next round."""
        self._message.inspects.append(Inspect(0, name))

    def send(self, message: EngineMessage) -> None:
        """Takes what the engine says."""
        if isinstance(message, EngineSnapshot):
            self.events.extend(message.snapshot.events)
            self.snapshot = message.snapshot
        elif isinstance(message, Inspected):
            self.detail = message.detail
        elif isinstance(message, EngineOutput):
            self._take(message.outputs)

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            answer = self._answers.get(output.handle)
            if answer is None:
                continue
            if output.token_ids:
                answer.arrivals.append(self._clock.now)
            if output.queue_s >= 0:
                answer.queue_s = output.queue_s
            answer.tokens.extend(token for token in output.token_ids if token != END_TOKEN)
            if output.finish_reason is not None:
                del self._answers[output.handle]
                self.ends.pop(output.handle, None)
                self.answered.add(answer, self._clock.now)
                if answer.then is not None:
                    answer.then(answer.tokens)

    def _happen(self) -> None:
        while self._due and self._due[0][0] <= self._clock.now:
            heapq.heappop(self._due)[2]()

    def _at(self, moment: float, call: Callable[[], None]) -> None:
        self._events += 1
        heapq.heappush(self._due, (moment, self._events, call))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._at(self._clock.now + seconds, call)

    # Who asks.

    def _begin(self, agent: _Agent) -> None:
        agent.said = [*_text(0, SYSTEM_TOKENS), *_text(1 + agent.project, PROJECT_TOKENS)]
        agent.turn, agent.turns = 0, self._random.randint(*TURNS)
        self._turn(agent)

    def _turn(self, agent: _Agent) -> None:
        agent.turn += 1
        agent.said += self._own(self._random.randint(*TOOL_TOKENS))
        name = f"agent-{agent.number:02d}-turn-{agent.turn}"
        answer = self._random.randint(*ANSWER_TOKENS)

        def answered(tokens: list[int]) -> None:
            agent.said += tokens
            over = agent.turn == agent.turns
            self._later(self._random.uniform(*THINKING_S), lambda: self._begin(agent) if over else self._turn(agent))

        self._submit(name, agent.said, answer, answered, limit=UNDECLARED_LIMIT, declared=False)

    def _ask(self) -> None:
        self._questions += 1
        prompt = self._own(self._random.randint(40, 300))
        handle = self._submit(f"question-{self._questions:04d}", prompt, self._random.randint(30, 200), priority=1)
        if self._random.random() < IMPATIENT:
            self._later(self._random.uniform(0.1, 0.9), lambda: self._leave(handle))
        self._later(self._random.expovariate(QUESTIONS_PER_S), self._ask)

    def _report(self) -> None:
        self._reports += 1
        prompt = self._own(self._random.randint(*REPORT_TOKENS))
        self._submit(f"report-{self._reports:03d}", prompt, self._random.randint(200, 400), priority=-1)
        self._later(self._random.uniform(0.6, 1.4) * REPORT_EVERY_S, self._report)

    def _leave(self, handle: int) -> None:
        if self._answers.pop(handle, None) is not None:
            self._message.aborts.append(handle)

    def _own(self, tokens: int) -> list[int]:
        """New text, of which no prefix is in any cache."""
        self._events += 1
        return _text(PROJECTS + 1 + self._events, tokens)

    def _submit(
        self,
        name: str,
        prompt: list[int],
        answer: int,
        answered: Callable[[list[int]], None] | None = None,
        *,
        limit: int | None = None,
        declared: bool = True,
        priority: int = 0,
    ) -> int:
        self._handle += 1
        self.ends[self._handle] = len(prompt) + answer
        self._answers[self._handle] = Answer(self._clock.now, answered)
        self._message.submits.append(
            Submit(
                handle=self._handle,
                request_id=name,
                prompt=np.asarray(prompt, np.int32).tobytes(),
                max_new_tokens=limit or answer,
                sampling=SamplingParameters(stop_token_ids=(END_TOKEN,)),
                declared=declared,
                priority=priority,
            )
        )
        return self._handle


def _empty() -> EngineInput:
    """A message that says nothing but that somebody looks: every snapshot is complete."""
    return EngineInput(version=PROTOCOL_VERSION, submits=[], aborts=[], inspects=[], watch_s=WATCH_S)


def _text(which: int, tokens: int) -> list[int]:
    """Token ids that stand for a text: the same for the same number, with no end token among them."""
    return [1 + (which * 15485863 + position * 32452843) % 50_000 for position in range(tokens)]
