"""``from tokenspeed import LLM, AsyncLLM``: the server's engine without HTTP."""

import asyncio
import atexit
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenspeed.frontend import async_llm
from tokenspeed.frontend.collect import collect
from tokenspeed.frontend.request import GenerationRequest
from tokenspeed.launch.service import Service
from tokenspeed.messages import FinishReason, TokenLogprobs
from tokenspeed.recipes.prepare import resolve_model
from tokenspeed.recipes.resolved import ResolvedConfig

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Completion:
    """One choice of one prompt.

    Attributes:
        index: of the choice.
        text, token_ids: what was generated.
        logprobs: one for each token where asked for.
        finish_reason: "stop" or "length".
        matched_stop: the stop string or token that ended it.
        prompt_token_ids: of its prompt.
        cached_tokens: prompt tokens of the whole call that came from the prefix cache.
    """

    index: int
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason
    matched_stop: str | int | None
    cached_tokens: int


class AsyncLLM(async_llm.AsyncLLM):
    """The frontend with an engine process under it.

    async with AsyncLLM.launch("smollm2-135m") as llm:
        async for delta in llm.generate(GenerationRequest(prompt="Hello")):
            print(delta.text, end="")
    """

    @classmethod
    def launch(cls, model: str | ResolvedConfig, **settings: str | int | float | bool) -> "_Launch":
        """Resolves ``model`` (a recipe's name, a GGUF file or a folder) with ``settings`` named like the flags of
        ``tokenspeed serve`` (``max_num_seqs=8``), and returns an async context manager that gives a ready AsyncLLM.

        Raises what the resolution raises; entering it raises EngineUnavailable where the engine cannot start.
        """
        return _Launch(_resolved(model, settings))


class _Launch:
    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self._service: Service | None = None

    async def __aenter__(self) -> async_llm.AsyncLLM:
        self._service = Service(self._config)
        try:
            await self._service.open()
            await self._service.llm.engine.wait_ready()
        except BaseException:
            await self._service.close()
            raise
        return self._service.llm

    async def __aexit__(self, *_: object) -> None:
        assert self._service is not None
        await self._service.close()


class LLM:
    """Generates offline.

        llm = LLM("smollm2-135m")
        for choices in llm.generate(["Hello", "The sky is"], max_tokens=16, temperature=0):
            print(choices[0].text)

    The engine runs in its own process until ``close`` (or the end of this one). Use from one thread at a time.
    """

    def __init__(self, model: str | ResolvedConfig, **settings: str | int | float | bool) -> None:
        """Starts the engine and waits until it is ready; see ``AsyncLLM.launch`` for the arguments and errors."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokenspeed frontend", daemon=True)
        self._thread.start()
        self._launch: _Launch | None = None
        try:
            launch = AsyncLLM.launch(model, **settings)
            self._llm = self._call(launch.__aenter__())
            self._launch = launch
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def generate(
        self, prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], **sampling: Any
    ) -> list[list[Completion]]:
        """Generates for every prompt together and returns the choices of each.

        Args:
            prompts: a text, texts, the token ids of one prompt, or those of several.
            sampling: the fields of GenerationRequest (``max_tokens``, ``temperature``, ``n``, ``stop``, ``seed`` ...);
                what is not given has the recipe's default sampling, as on the server.

        Raises:
            RequestRefused, EngineUnavailable, EngineFailed: as AsyncLLM.generate.
        """
        settings: dict[str, Any] = {**self._llm.config.api.default_sampling, **sampling}
        requests = [GenerationRequest(prompt=prompt, **settings) for prompt in _each(prompts)]
        return self._call(self._generate(requests))

    def chat(self, messages: list[dict[str, Any]], **sampling: Any) -> list[Completion]:
        """Generates the next message of a conversation and returns its choices."""

        async def prompt() -> list[int]:
            return await self._llm.chat_prompt(messages)

        return self.generate(self._call(prompt()), **sampling)[0]

    def close(self) -> None:
        """Ends the engine process. May be called twice."""
        launch, self._launch = self._launch, None
        if launch is not None:
            self._call(launch.__aexit__())
            atexit.unregister(self.close)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _generate(self, requests: list[GenerationRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: GenerationRequest) -> list[Completion]:
        generation = await self._llm.start([request])
        try:
            results = await collect(generation)
        finally:
            generation.cancel()
        prompt = list(generation.prompts[0].token_ids)
        return [
            Completion(
                index=result.index,
                prompt_token_ids=prompt,
                text=result.text,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                finish_reason=result.finish_reason,
                matched_stop=result.matched_stop,
                cached_tokens=generation.usage.cached_tokens,
            )
            for result in results
        ]

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _each(
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> list[str | Sequence[int]]:
    """Returns the prompts one by one, whichever of the four ways they were given in."""
    if isinstance(prompts, str):
        return [prompts]
    given: list[Any] = list(prompts)
    return [given] if given and isinstance(given[0], int) else given


def _resolved(model: str | ResolvedConfig, settings: dict[str, str | int | float | bool]) -> ResolvedConfig:
    return model if isinstance(model, ResolvedConfig) else resolve_model(model, settings)
