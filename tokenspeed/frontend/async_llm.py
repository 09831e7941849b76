"""AsyncLLM: text in, text out, over an engine in another process. Server and offline users share it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tokenspeed.frontend.chat_prompt import ChatPrompt, characters_of, render_chat
from tokenspeed.frontend.chat_template import ChatTemplate, read_template_setting
from tokenspeed.frontend.collect import collect
from tokenspeed.frontend.connection import EngineConnection
from tokenspeed.frontend.embedding_rules import embedding_rules
from tokenspeed.frontend.engine_state import EngineState
from tokenspeed.frontend.errors import (
    EngineFailed,
    EngineUnavailable,
)
from tokenspeed.frontend.generation import Generation, Prompt
from tokenspeed.frontend.line import WaitingLine
from tokenspeed.frontend.long_texts import PromptBound, TextDesk
from tokenspeed.frontend.looking import Looking
from tokenspeed.frontend.observer import FrontendObserver
from tokenspeed.frontend.open_choices import OpenChoices
from tokenspeed.frontend.orders import EngineOrders
from tokenspeed.frontend.request import Delta, GenerationRequest
from tokenspeed.frontend.text_assets import load_text_assets
from tokenspeed.frontend.validate import check_constraint, check_request
from tokenspeed.messages import (
    Action,
    EngineOutput,
    EngineSnapshot,
    EngineStatus,
    Inspected,
    OrderDone,
)
from tokenspeed.messages.snapshot import RequestDetail
from tokenspeed.recipes.model_config import ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ResolvedConfig

_log = logging.getLogger(__name__)


class AsyncLLM:
    """Tokenizes, submits, detokenizes.

    Attributes:
        config: what it was made from.
        model: the model's own dimensions and end tokens.
        tokenizer: of the model.
        embeddings: whether it gives embeddings, and which.
        engine: the engine's state as last heard.
        desk: where long texts are worked on.
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
        self.embeddings = embedding_rules(config.api.embeddings, config.model, self.model.hidden_size)
        self.on_start: Callable[[Generation], None] | None = None
        setting = config.api.chat_template
        source = read_template_setting(setting) if setting else assets.chat_template
        self._template = ChatTemplate(source, self.tokenizer.bos_token, self.tokenizer.eos_token) if source else None
        if self._template is None:
            _log.warning(
                "the model has no chat template: /v1/chat/completions will answer 400; --chat-template gives it one"
            )
        self.engine = EngineState()
        self.desk = TextDesk()
        self._connection = connection
        self._orders = EngineOrders(connection.order)
        self._looking = Looking(self.engine, connection.watch, connection.inspect)
        self._line = WaitingLine(config.api.max_waiting)
        self._open = OpenChoices(
            connection,
            self.tokenizer,
            self._line,
            end_token_ids=self.model.eos_token_ids,
            seed=config.seed,
            observer=observer,
        )
        self._draining = False
        connection.listen(self)

    # -- what callers use ---------------------------------------------------------------------------------------------

    @property
    def observer(self) -> FrontendObserver | None:
        return self._open.observer

    @observer.setter
    def observer(self, observer: FrontendObserver | None) -> None:
        self._open.observer = observer

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def open_choices(self) -> int:
        """How many choices the engine is working on for this frontend."""
        return len(self._open)

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
        return time.monotonic() - self.engine.moved_at if self._open and not self.paused else 0.0

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and answer together, in tokens."""
        said = self.engine.facts.get("max_model_len")
        if isinstance(said, int) and said > 0:
            return said
        limit = self.config.scheduler.max_len
        return min(limit, self.model.context_length) if limit else self.model.context_length

    @property
    def prompt_bound(self) -> PromptBound:
        """How long prompts may be that something is generated for."""
        return PromptBound(self.max_model_len, self.config.api.max_prompt_tokens)

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
        generation = Generation(prompts, self._open.abort)
        lengths = [check_request(prompt, self.model, self.max_model_len) for prompt in prompts]
        if not self._open:
            self.engine.moved()
        given = [request.timeout_s for request in requests if request.timeout_s is not None]
        deadline = time.time() + began + min(given) - asyncio.get_running_loop().time() if given else 0.0
        for prompt, max_new_tokens in zip(prompts, lengths, strict=True):
            self._open.submit(generation, prompt, max_new_tokens, deadline)
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
        generation = Generation(prompts, self._open.abort)
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
        bound: PromptBound | None = None,
    ) -> ChatPrompt:
        """Returns the prompt of a conversation; ``variables`` go to the template, tools among them.

        Raises RequestRefused where the template is missing, refuses, or has no place for tools that are given, and, as
        far as that is found without counting all its tokens, where the prompt is beyond ``bound``.
        """
        return await self.desk.work(
            lambda: render_chat(
                self._template,
                self.tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
                bound=bound,
            ),
            characters_of(messages, variables),
        )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; long ones are worked on beside the event loop."""
        return await self.desk.work(lambda: self.tokenizer.encode(text, add_special_tokens), len(text))

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

    async def look(self) -> None:
        """Has the engine's snapshots be complete for a while, and waits a moment for one that is."""
        await self._looking.look()

    async def inspect(self, name: str) -> RequestDetail | None:
        """Returns what is known of the request of this id or handle, None where nothing is.

        Raises EngineUnavailable where no engine is ready, TimeoutError where it is too busy to answer.
        """
        if not self.engine.ready:
            raise self.engine.unavailable()
        return await self._looking.inspect(name)

    def abort_requests(self, request_id: str | None) -> int:
        """Ends the calls of this name (None: all calls) with an error, and returns how many choices that were."""
        ended = self._open.calls(request_id)
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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._open.wait_for_none(), grace_s)
        cut = len(self._open)
        for generation in self._open.calls():
            generation.fail(EngineFailed("the server shut down before the answer was complete", "shutdown"))
        self._connection.drain()
        return cut

    # -- what the connection calls ------------------------------------------------------------------------------------

    def on_output(self, output: EngineOutput) -> None:
        self.engine.heard()
        self.engine.moved()
        self._open.take(output.outputs)

    def on_status(self, status: EngineStatus) -> None:
        self.engine.set_status(status)
        if status.phase in ("failed", "stopped"):
            self._open.fail(self.engine.last_error or "the engine stopped")

    def on_snapshot(self, snapshot: EngineSnapshot) -> None:
        self.engine.set_snapshot(snapshot.snapshot)

    def on_order_done(self, answer: OrderDone) -> None:
        self.engine.heard()
        self._orders.done(answer)

    def on_inspected(self, answer: Inspected) -> None:
        self.engine.heard()
        self._looking.answered(answer)

    def on_engine_lost(self, cause: str) -> None:
        self.engine.set_lost(cause)
        self._looking.engine_gone(cause)
        self._orders.engine_gone(cause)
        self._open.fail(cause)

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
        bound = self.prompt_bound

        def encoded(request: GenerationRequest) -> Sequence[int]:
            if not isinstance(request.prompt, str):
                return request.prompt
            bound.check_text(self.tokenizer, request.prompt, request.prompt_field)
            return self.tokenizer.encode(request.prompt, add_special_tokens=True)

        characters = sum(len(request.prompt) for request in requests if isinstance(request.prompt, str))
        all_ids = await self.desk.work(lambda: [encoded(request) for request in requests], characters)
        for request, ids in zip(requests, all_ids, strict=True):
            bound.check_tokens(len(ids), request.prompt_field)
        return [Prompt(request, ids) for request, ids in zip(requests, all_ids, strict=True)]
