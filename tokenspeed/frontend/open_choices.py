"""The choices that the engine is working on for this frontend, from Submit to their last token."""

import array
import asyncio
import itertools
import random
import time
import uuid
from collections.abc import Sequence

from tokenspeed.frontend.choice import Choice
from tokenspeed.frontend.connection import EngineConnection
from tokenspeed.frontend.errors import EngineFailed, EngineUnavailable, FrontendError, RequestRefused
from tokenspeed.frontend.generation import Generation, LiveChoice, Prompt
from tokenspeed.frontend.line import WaitingLine
from tokenspeed.frontend.observer import FrontendObserver
from tokenspeed.frontend.parsing.parser import AnswerParser
from tokenspeed.frontend.request import GenerationRequest
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.messages import BadWords, Finish, RequestOutput, Submit


class OpenChoices:
    """Submits choices, takes what the engine says of them, and lets go of those that ended.

    Attributes:
        observer: hears what happens to them.
    """

    def __init__(
        self,
        connection: EngineConnection,
        tokenizer: Tokenizer,
        line: WaitingLine,
        *,
        end_token_ids: Sequence[int],
        seed: int,
        observer: FrontendObserver | None,
    ) -> None:
        """``line`` counts those without a token; ``seed`` makes the seeds of requests that have none, 0 at random."""
        self.observer = observer
        self._connection = connection
        self._tokenizer = tokenizer
        self._line = line
        self._end_token_ids = end_token_ids
        self._random = random.Random(seed) if seed else random.SystemRandom()
        self._handles = itertools.count(1)
        self._choices: dict[int, LiveChoice] = {}
        self._none_open = asyncio.Event()

    def __len__(self) -> int:
        return len(self._choices)

    def calls(self, request_id: str | None = None) -> set[Generation]:
        """Returns the calls that open choices belong to, those of this name only where one is given."""
        return {
            live.generation
            for live in self._choices.values()
            if request_id is None or live.prompt.request.request_id == request_id
        }

    async def wait_for_none(self) -> None:
        """Returns once no choice is open."""
        if self._choices:
            await self._none_open.wait()

    def submit(self, generation: Generation, prompt: Prompt, max_new_tokens: int, deadline: float = 0.0) -> None:
        """Hands one prompt's choices to the engine; their handles go into ``generation.live``.

        ``deadline``: seconds since the epoch when the call will be ended, 0 for none.
        """
        request = prompt.request
        words = tuple(sorted({word.lstrip(" ") for word in request.bad_words}))
        bad_words = BadWords(words=words) if words else None
        seed = self._random.getrandbits(63) if request.seed is None else request.seed
        prompt_bytes = array.array("i", prompt.token_ids).tobytes()
        name = request.request_id or uuid.uuid4().hex
        first = len(generation.live)
        parsing = request.parsing
        shown = frozenset[int]() if parsing is None else parsing.marker_ids(self._tokenizer)
        self._line.joined(request.generated_choices)
        self._none_open.clear()
        for at in range(request.generated_choices):
            choice = Choice(
                first + at,
                self._tokenizer,
                stop=request.stop,
                min_tokens=request.min_tokens,
                include_stop=request.include_stop,
                skip_special_tokens=request.skip_special_tokens,
                parser=None if parsing is None else AnswerParser(parsing),
                shown=shown,
            )
            live = LiveChoice(next(self._handles), choice, prompt, generation)
            generation.live[live.handle] = self._choices[live.handle] = live
            self._connection.submit(
                Submit(
                    handle=live.handle,
                    request_id=name if request.generated_choices == 1 else f"{name}/{at}",
                    prompt=prompt_bytes,
                    max_new_tokens=max_new_tokens,
                    sampling=request.sampling(self._end_token_ids, seed, at),
                    declared=request.max_tokens is not None,
                    priority=request.priority,
                    namespace=request.cache_salt.encode(),
                    constraint=request.constraint,
                    pooling=request.pooling,
                    bad_words=bad_words,
                    thinking=request.thinking,
                    deadline=deadline,
                )
            )
        if self.observer is not None:
            self.observer.submitted(request.generated_choices, len(prompt.token_ids))

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """What a round of the engine has to say; what it says of choices that are not open any more is passed over."""
        now = time.monotonic()
        for item in outputs:
            live = self._choices.get(item.handle)
            if live is not None:
                self._take(live, item, now)

    def abort(self, handles: list[int]) -> None:
        """Has the engine stop working on these choices; those that ended already are passed over."""
        now = time.monotonic()
        for handle in handles:
            live = self._choices.get(handle)
            if live is not None:
                self._connection.abort(handle)
                self._forget(live, "abort", now)

    def fail(self, cause: str) -> None:
        """Ends every open call: the engine that worked on them is gone."""
        for live in list(self._choices.values()):
            self._forget(live, "error", time.monotonic())
            live.generation.fail(
                EngineFailed(f"the engine ended before the answer was complete: {cause}", "engine_error")
            )

    def _take(self, live: LiveChoice, item: RequestOutput, now: float) -> None:
        """One request's share of a round."""
        generation, choice = live.generation, live.choice
        if item.prompt_logprobs is not None:
            live.prompt.take_logprobs(item.prompt_logprobs)
        if item.cached_tokens > 0 and choice.index % live.prompt.request.generated_choices == 0:
            generation.usage.cached_tokens += item.cached_tokens
            live.prompt.cached_tokens = item.cached_tokens
        if item.finish_reason == "error" or item.finish_reason == "abort":
            self._forget(live, item.finish_reason, now)
            generation.fail(_engine_error(item, live.prompt.request))
            return
        if item.embedding:
            live.prompt.embedding = item.embedding
        if item.token_ids or item.embedding:
            self._observe_tokens(live, item, now)
            live.last_token_at = now
        delta = choice.push(item)
        if delta is not None:
            generation.deliver(live, delta)
        if choice.finished:
            if item.finish_reason is None:
                self._connection.finish(Finish(live.handle, choice.generated))
            self._forget(live, "stop" if delta is None else str(delta.finish_reason), now)
            generation.end_choice(live)

    def _observe_tokens(self, live: LiveChoice, item: RequestOutput, now: float) -> None:
        live.generation.timings.took(now, len(item.token_ids), live.last_token_at, item.queue_s)
        if not live.last_token_at:
            self._line.began()
        if self.observer is None:
            return
        if live.last_token_at:
            self.observer.tokens(len(item.token_ids), now - live.last_token_at)
        else:
            self.observer.first_token(now - live.generation.started_at, max(item.cached_tokens, 0))
            self.observer.tokens(len(item.token_ids), None)
            if item.queue_s >= 0:
                self.observer.queued(item.queue_s)

    def _forget(self, live: LiveChoice, reason: str, now: float) -> None:
        if self._choices.pop(live.handle, None) is None:
            return
        if not live.last_token_at:
            self._line.left()
        live.generation.timings.ended_at = now
        if self.observer is not None:
            self.observer.finished(reason, now - live.generation.started_at, live.choice.generated)
        if not self._choices:
            self._none_open.set()


def _engine_error(item: RequestOutput, request: GenerationRequest) -> FrontendError:
    """What the engine said of a request, as the error its caller gets."""
    message = item.error or "the engine aborted the request"
    if item.error_code in ("invalid_constraint", "constraint_too_costly", "constraint_failed"):
        code = item.error_code if item.error_code == "constraint_failed" else "invalid_value"
        field = "bad_words" if request.constraint is None else request.constraint_field
        return RequestRefused(f"{field}: {message}", code, field)
    if item.error_code in ("context_length_exceeded", "capacity", "invalid_request"):
        return RequestRefused(message, item.error_code)
    if item.error_code in ("draining", "constraint_busy"):
        return EngineUnavailable(message, item.error_code)
    return EngineFailed(message, item.error_code or "engine_error")
