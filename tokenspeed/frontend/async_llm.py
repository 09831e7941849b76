"""AsyncLLM: text in, text out, over an engine in another process. Server and offline users share it."""

import array
import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from tokenspeed.frontend.chat_prompt import ChatPrompt, render_chat
from tokenspeed.frontend.chat_template import ChatTemplate, read_template_setting
from tokenspeed.frontend.choice import Choice
from tokenspeed.frontend.collect import collect
from tokenspeed.frontend.connection import EngineConnection
from tokenspeed.frontend.engine_state import EngineState
from tokenspeed.frontend.errors import (
    EngineFailed,
    EngineUnavailable,
    FrontendError,
    RequestRefused,
)
from tokenspeed.frontend.generation import Generation, LiveChoice, Prompt
from tokenspeed.frontend.line import WaitingLine
from tokenspeed.frontend.orders import EngineOrders
from tokenspeed.frontend.parsing.parser import AnswerParser
from tokenspeed.frontend.request import Delta, GenerationRequest
from tokenspeed.frontend.text_assets import load_text_assets
from tokenspeed.frontend.validate import check_constraint, check_request
from tokenspeed.messages import (
    Action,
    EngineOutput,
    EngineSnapshot,
    EngineStatus,
    Finish,
    OrderDone,
    RequestOutput,
    Submit,
)
from tokenspeed.recipes.model_config import ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ResolvedConfig

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

THREAD_ABOVE_CHARACTERS = 4096
"""Longer texts are rendered and tokenized on a worker thread, so that the event loop goes on serving streams."""


class FrontendObserver(Protocol):
    """Hears what happens to requests, for metrics. All times are seconds."""

    def submitted(self, choices: int, prompt_tokens: int) -> None: ...

    def first_token(self, waited: float, cached_tokens: int) -> None: ...

    def tokens(self, count: int, since_last: float | None) -> None: ...

    def queued(self, seconds: float) -> None: ...

    def finished(self, reason: str, took: float, tokens: int) -> None: ...


class AsyncLLM:
    """Tokenizes, submits, detokenizes.

    Attributes:
        config: what it was made from.
        model: the model's own dimensions and end tokens.
        tokenizer: of the model.
        engine: the engine's state as last heard.
        observer: hears what happens to requests; may be set once, before the first request.
        on_start: hears of each call that was handed to the engine, in the task that made it; set likewise.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        connection: EngineConnection,
        *,
        model: ModelConfig | None = None,
        observer: FrontendObserver | None = None,
    ) -> None:
        """Reads tokenizer and chat template; must run inside the event loop that it will be used from.

        Args:
            config: the resolved configuration.
            connection: to the engine; from here on this object listens to it.
            model: the model's dimensions where the caller has read them already.
            observer: for metrics.

        Raises:
            TokenizerError, ChatTemplateError, CheckpointError: the model's files cannot be used; the message says how
                to mend that.
        """
        self.config = config
        self.model = model or read_model_config(config.model)
        assets = load_text_assets(config.model)
        self.tokenizer = assets.tokenizer
        self.observer = observer
        self.on_start: Callable[[Generation], None] | None = None
        setting = config.api.chat_template
        source = read_template_setting(setting) if setting else assets.chat_template
        self._template = ChatTemplate(source, self.tokenizer.bos_token, self.tokenizer.eos_token) if source else None
        if self._template is None:
            _log.warning(
                "the model has no chat template: /v1/chat/completions will answer 400; --chat-template gives it one"
            )
        self.engine = EngineState()
        self._connection = connection
        self._orders = EngineOrders(connection.order)
        self._line = WaitingLine(config.api.max_waiting)
        self._live: dict[int, LiveChoice] = {}
        self._handles = itertools.count(1)
        self._random = random.Random(config.seed) if config.seed else random.SystemRandom()
        self._draining = False
        self._drained = asyncio.Event()
        connection.listen(self)

    # -- what callers use ---------------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def open_choices(self) -> int:
        """How many choices the engine is working on for this frontend."""
        return len(self._live)

    @property
    def waiting_choices(self) -> int:
        """How many of them have no token yet."""
        return self._line.waiting

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is about to end."""
        return self._draining

    @property
    def paused(self) -> bool:
        """Whether an operator stopped the engine from planning steps."""
        return self._orders.paused

    @property
    def stalled_for(self) -> float:
        """Seconds for which requests have been open without anything moving; 0 where none is open, or in a pause."""
        return time.monotonic() - self.engine.moved_at if self._live and not self.paused else 0.0

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and answer together, in tokens."""
        said = self.engine.facts.get("max_model_len")
        if isinstance(said, int) and said > 0:
            return said
        limit = self.config.scheduler.max_len
        return min(limit, self.model.context_length) if limit else self.model.context_length

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Yields what each choice adds, as it comes. Closing the iterator, or cancelling its task, aborts the request.

        With ``best_of`` above ``n`` the choices come whole, at the end.

        Raises:
            RequestRefused: the request is at fault. ContextLengthExceeded is one of these.
            EngineUnavailable: the engine takes no requests now.
            EngineFailed: the engine gave up on it.
        """
        generation = await self.start([request])
        try:
            if request.generated_choices > request.n:
                for result in await collect(generation):
                    yield result.as_delta()
                return
            while batch := await generation.next_batch():
                for delta in batch:
                    yield delta
        finally:
            generation.cancel()

    async def start(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Checks, tokenizes and submits one call of one or more prompts; raises as ``generate`` does.

        The choices are numbered through: those of the first prompt first. The caller must read the generation to its
        end or cancel it.
        """
        began = asyncio.get_running_loop().time()
        self._check_ready()
        self._check_constraints(requests)
        self._line.check()
        prompts = await self._prompts(requests)
        self._check_ready()  # tokenizing may have taken a while
        self._line.check()
        generation = Generation(prompts, self._abort)
        lengths = [check_request(prompt, self.model, self.max_model_len) for prompt in prompts]
        if not self._live:
            self.engine.moved()
        for prompt, max_new_tokens in zip(prompts, lengths, strict=True):
            self._submit(generation, prompt, max_new_tokens)
        given = [request.timeout_s for request in requests if request.timeout_s is not None]
        if given:
            generation.end_by(began + min(given), min(given))
        if self.on_start is not None:
            self.on_start(generation)
        return generation

    async def start_without_answer(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Checks and tokenizes like ``start``, but has nothing generated: every choice ends at once, with no text."""
        self._check_ready()
        prompts = await self._prompts(requests)
        for prompt in prompts:
            check_request(prompt, self.model, self.max_model_len, needs_room=False)
        generation = Generation(prompts, self._abort)
        for index in range(sum(prompt.request.n for prompt in prompts)):
            generation.add(Delta(index=index, finish_reason="length"))
        return generation

    async def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation; raises RequestRefused where the template is missing or refuses."""
        prompt = await self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return prompt.token_ids

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> ChatPrompt:
        """Returns the prompt of a conversation; ``variables`` go to the template, tools among them.

        Raises RequestRefused where the template is missing, refuses, or has no place for tools that are given.
        """
        return await _off_loop(
            lambda: render_chat(
                self._template,
                self.tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            ),
            len(str(messages)) + len(str(variables or "")),
        )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; long ones are worked on beside the event loop."""
        return await _off_loop(lambda: self.tokenizer.encode(text, add_special_tokens), len(text))

    async def order(self, action: Action) -> str:
        """Has the engine do what an operator wants; returns why it refused, "" where it did not.

        Raises EngineUnavailable where it takes no orders now.
        """
        if not self.engine.ready:
            raise self.engine.unavailable()
        refused = await self._orders.give(action)
        self.engine.moved()  # a pause is no standstill
        self.engine.notify()
        return refused

    def abort_requests(self, request_id: str | None) -> int:
        """Ends the calls of this name (None: all calls) with an error, and returns how many choices that were."""
        ended = {
            live.generation
            for live in self._live.values()
            if request_id is None or live.prompt.request.request_id == request_id
        }
        count = sum(len(generation.live) for generation in ended)
        for generation in ended:
            generation.fail(EngineFailed("the request was aborted by the server's operator", "aborted"))
        return count

    async def drain(self, grace_s: float) -> int:
        """Refuses new requests and waits for the open ones to end, at most ``grace_s`` seconds.

        Returns how many choices were cut off (and aborted) when the time was up.
        """
        self._draining = True
        self.engine.notify()
        if self.paused:
            with contextlib.suppress(EngineUnavailable):
                await self.order("continue")  # open requests are to end
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_s)
        cut = len(self._live)
        for generation in {live.generation for live in self._live.values()}:
            generation.fail(EngineFailed("the server shut down before the answer was complete", "shutdown"))
        self._connection.drain()
        return cut

    # -- what the connection calls ------------------------------------------------------------------------------------

    def on_output(self, output: EngineOutput) -> None:
        self.engine.heard()
        self.engine.moved()
        now = time.monotonic()
        for item in output.outputs:
            live = self._live.get(item.handle)
            if live is not None:
                self._take(live, item, now)

    def on_status(self, status: EngineStatus) -> None:
        self.engine.set_status(status)
        if status.phase in ("failed", "stopped"):
            self._fail_all(self.engine.last_error or "the engine stopped")

    def on_snapshot(self, snapshot: EngineSnapshot) -> None:
        self.engine.set_snapshot(snapshot.snapshot)

    def on_order_done(self, answer: OrderDone) -> None:
        self.engine.heard()
        self._orders.done(answer)

    def on_engine_lost(self, cause: str) -> None:
        self.engine.set_lost(cause)
        self._orders.engine_gone(cause)
        self._fail_all(cause)

    def on_engine_given_up(self, cause: str) -> None:
        self.engine.set_given_up(cause)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._draining:
            raise EngineUnavailable("the server is shutting down and takes no new requests", "draining")
        if not self.engine.ready:
            raise self.engine.unavailable()

    def _check_constraints(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.constraint is not None:
                check_constraint(
                    request.constraint,
                    request.constraint_field,
                    enabled=self.config.api.structured_output != "none",
                )

    async def _prompts(self, requests: Sequence[GenerationRequest]) -> list[Prompt]:
        most = self.config.api.max_prompt_tokens
        prompts = [Prompt(request, await self._prompt_ids(request)) for request in requests]
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if most and longest > most:
            raise RequestRefused(
                f"the prompt has {longest} tokens, and this server takes {most} at most", "prompt_too_long", "prompt"
            )
        return prompts

    async def _prompt_ids(self, request: GenerationRequest) -> Sequence[int]:
        if isinstance(request.prompt, str):
            return await self.encode(request.prompt)
        return request.prompt

    def _submit(self, generation: Generation, prompt: Prompt, max_new_tokens: int) -> None:
        request = prompt.request
        seed = self._random.getrandbits(63) if request.seed is None else request.seed
        prompt_bytes = array.array("i", prompt.token_ids).tobytes()
        name = request.request_id or uuid.uuid4().hex
        first = len(generation.live)
        parsing = request.parsing
        shown = frozenset[int]() if parsing is None else parsing.marker_ids(self.tokenizer)
        self._line.joined(request.generated_choices)
        for at in range(request.generated_choices):
            choice = Choice(
                first + at,
                self.tokenizer,
                stop=request.stop,
                min_tokens=request.min_tokens,
                include_stop=request.include_stop,
                skip_special_tokens=request.skip_special_tokens,
                parser=None if parsing is None else AnswerParser(parsing),
                shown=shown,
            )
            live = LiveChoice(next(self._handles), choice, prompt, generation)
            generation.live[live.handle] = self._live[live.handle] = live
            self._connection.submit(
                Submit(
                    handle=live.handle,
                    request_id=name if request.generated_choices == 1 else f"{name}/{at}",
                    prompt=prompt_bytes,
                    max_new_tokens=max_new_tokens,
                    sampling=request.sampling(self.model.eos_token_ids, seed, at),
                    declared=request.max_tokens is not None,
                    priority=request.priority,
                    namespace=request.cache_salt.encode(),
                    constraint=request.constraint,
                )
            )
        if self.observer is not None:
            self.observer.submitted(request.generated_choices, len(prompt.token_ids))

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
        if item.token_ids:
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
        if self._live.pop(live.handle, None) is None:
            return
        if not live.last_token_at:
            self._line.left()
        live.generation.timings.ended_at = now
        if self.observer is not None:
            self.observer.finished(reason, now - live.generation.started_at, live.choice.generated)
        if self._draining and not self._live:
            self._drained.set()

    def _abort(self, handles: list[int]) -> None:
        now = time.monotonic()
        for handle in handles:
            live = self._live.get(handle)
            if live is not None:
                self._connection.abort(handle)
                self._forget(live, "abort", now)

    def _fail_all(self, cause: str) -> None:
        """Ends every open call: the engine that worked on them is gone."""
        for live in list(self._live.values()):
            self._forget(live, "error", time.monotonic())
            live.generation.fail(
                EngineFailed(f"the engine ended before the answer was complete: {cause}", "engine_error")
            )


def _engine_error(item: RequestOutput, request: GenerationRequest) -> FrontendError:
    """What the engine said of a request, as the error its caller gets."""
    message = item.error or "the engine aborted the request"
    if item.error_code in ("invalid_constraint", "constraint_too_costly", "constraint_failed"):
        code = item.error_code if item.error_code == "constraint_failed" else "invalid_value"
        return RequestRefused(f"{request.constraint_field}: {message}", code, request.constraint_field)
    if item.error_code in ("context_length_exceeded", "capacity", "invalid_request"):
        return RequestRefused(message, item.error_code)
    if item.error_code in ("draining", "constraint_busy"):
        return EngineUnavailable(message, item.error_code)
    return EngineFailed(message, item.error_code or "engine_error")


async def _off_loop(work: Callable[[], _Result], characters: int) -> _Result:
    return await asyncio.to_thread(work) if characters > THREAD_ABOVE_CHARACTERS else work()
