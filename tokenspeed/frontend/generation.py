"""One call in flight: its choices, and the mailbox that its caller reads from."""

import asyncio
import time
from collections.abc import Callable, Sequence

from tokenspeed.frontend.choice import Choice
from tokenspeed.frontend.errors import DeadlineExceeded, FrontendError, ReaderTooSlow
from tokenspeed.frontend.request import Delta, GenerationRequest, Usage
from tokenspeed.frontend.timings import Timings
from tokenspeed.messages import PromptLogprobs, TokenLogprobs

CHUNK_BYTES = 200
LOGPROB_BYTES = 60
"""About what an event takes without its text, and a log-probability in it."""


class Prompt:
    """One prompt of a call.

    Attributes:
        request: what was asked.
        token_ids: of the prompt.
        logprobs: of tokens 1 and on, as they come in; the first token of a prompt has none.
        cached_tokens: how many of its tokens came from the prefix cache, once that is known.
        embedding: float32 in little-endian order, where it is asked for, once it is there; see RequestOutput.
    """

    def __init__(self, request: GenerationRequest, token_ids: Sequence[int]) -> None:
        self.request = request
        self.token_ids = token_ids
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.cached_tokens = 0
        self.embedding = b""
        self.waiting: list[Delta] = []

    @property
    def complete(self) -> bool:
        """Whether all log-probabilities that were asked for are here."""
        return self.request.prompt_logprobs < 0 or len(self.logprobs) >= len(self.token_ids) - 1

    def take_logprobs(self, slice_: PromptLogprobs) -> None:
        for at, entry in enumerate(slice_.tokens, slice_.start):
            if at > 0:
                self.logprobs[at] = entry


class LiveChoice:
    """A choice that the engine is working on, under its ``handle``."""

    __slots__ = ("choice", "generation", "handle", "last_token_at", "prompt")

    def __init__(self, handle: int, choice: Choice, prompt: Prompt, generation: "Generation") -> None:
        self.handle = handle
        self.choice = choice
        self.prompt = prompt
        self.generation = generation
        self.last_token_at = 0.0


class Generation:
    """What AsyncLLM.start returns: read it with ``next_batch`` until it returns nothing, or ``cancel`` it.

    Attributes:
        prompts: of the call, in order; choice ``i`` belongs to prompt ``i // choices per prompt``.
        usage: counts so far.
        timings: what it took so far.
        cancelled: the reader gave it up.
    """

    def __init__(self, prompts: list[Prompt], abort: Callable[[list[int]], None]) -> None:
        self.prompts = prompts
        parsed = any(prompt.request.parsing and prompt.request.parsing.reasoning_format for prompt in prompts)
        self.usage = Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts), reasoning_tokens=0 if parsed else None
        )
        self.started_at = time.monotonic()
        self.timings = Timings(self.started_at)
        self.live: dict[int, LiveChoice] = {}
        self.cancelled = False
        self._abort = abort
        self._mailbox: list[Delta] = []
        self._error: FrontendError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._most_bytes = 0
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._wait_until = 0.0
        self._late = False

    @property
    def error(self) -> FrontendError | None:
        """What the call ended with, where that is an error."""
        return self._error

    def bound_mailbox(self, most_bytes: int) -> None:
        """Ends the call with ReaderTooSlow when more than about so many bytes wait to be read; 0 is no bound."""
        self._most_bytes = most_bytes

    def end_by(self, deadline: float, given_s: float) -> None:
        """Ends the call with DeadlineExceeded at ``deadline`` of the event loop's time; the message has ``given_s``."""
        message = f"the answer was not complete within {given_s:.3g} s, the time that the request was given"
        expired = DeadlineExceeded(message, "deadline_exceeded")
        self._deadline = asyncio.get_running_loop().call_at(deadline, self.fail, expired)

    async def arrived(self, within_s: float) -> bool:
        """Waits until ``next_batch`` would return (or raise) at once, and returns True; False after ``within_s``.

        Seconds; 0 waits without end. One timer serves the whole call: it is set anew once it rings, not at each wait.
        """
        loop = asyncio.get_running_loop()
        self._late = False
        if within_s > 0:
            self._wait_until = loop.time() + within_s
            if self._timer is None:
                self._timer = loop.call_at(self._wait_until, self._ring)
        while not self._mailbox and self._error is None and self.live and not self._late:
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return not self._late or bool(self._mailbox) or self._error is not None or not self.live

    async def next_batch(self) -> list[Delta]:
        """Returns the deltas that arrived since the last call, at least one; [] after the end or a cancel.

        Raises FrontendError, once everything before it has been read, where the engine gave up on the call.
        """
        while not self._mailbox and self._error is None and self.live:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._mailbox:
            batch, self._mailbox, self._bytes = self._mailbox, [], 0
            return batch
        if self._error is not None:
            raise self._error
        return []

    def cancel(self) -> None:
        """Gives the call up: the engine aborts what still runs, and the reader gets no more. May be called twice."""
        self.cancelled = True
        self._mailbox = []
        self._stop_timers()
        if self.live:
            self._abort(list(self.live))
            self.live = {}
        self._wake()

    def deliver(self, live: LiveChoice, delta: Delta) -> None:
        """Puts a delta into the mailbox; one whose prompt's log-probabilities are not all here waits for them."""
        prompt = live.prompt
        if not prompt.complete:
            prompt.waiting.append(delta)
            return
        if prompt.waiting:
            self._mailbox.extend(prompt.waiting)
            prompt.waiting = []
        self.add(delta)

    def add(self, delta: Delta) -> None:
        """Puts a delta into the mailbox."""
        self._mailbox.append(delta)
        self._wake()
        if self._most_bytes:
            self._bytes += _weight(delta)
            if self._bytes > self._most_bytes and self._error is None:
                self.fail(
                    ReaderTooSlow(
                        f"the answer was read too slowly: more than {self._most_bytes} bytes of it waited; "
                        "read faster, or ask without stream",
                        "slow_reader",
                    )
                )

    def end_choice(self, live: LiveChoice) -> None:
        """Takes a finished choice off the call."""
        self.live.pop(live.handle, None)
        self.usage.completion_tokens += live.choice.generated
        if self.usage.reasoning_tokens is not None:
            self.usage.reasoning_tokens += live.choice.reasoning_tokens
        if not self.live:
            self._stop_timers()
            for prompt in self.prompts:
                self._mailbox.extend(prompt.waiting)
                prompt.waiting = []
            self._wake()

    def fail(self, error: FrontendError) -> None:
        """Ends the call with an error; what still runs is aborted."""
        self._stop_timers()
        self._error = error
        if self.live:
            self._abort(list(self.live))
            self.live = {}
        self._wake()

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._timer = self._deadline = None

    def _ring(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._wait_until:
            self._timer = loop.call_at(self._wait_until, self._ring)
        else:
            self._late = True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _weight(delta: Delta) -> int:
    """About how many bytes a delta is on the wire."""
    alternatives = sum(1 + len(entry.top_ids) for entry in delta.logprobs)
    return CHUNK_BYTES + len(delta.text) + LOGPROB_BYTES * alternatives
