"""POST /v1/completions."""

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.collect import ChoiceResult, collect
from tokenspeed.frontend.errors import FrontendError
from tokenspeed.frontend.generation import Generation, Prompt
from tokenspeed.frontend.request import MAX_REQUEST_CHOICES, Delta, GenerationRequest
from tokenspeed.frontend.tokenizer import decode
from tokenspeed.server.body import read_json
from tokenspeed.server.context import ServerContext, context_of, json_response, request_id_of
from tokenspeed.server.errors import ApiError, from_frontend
from tokenspeed.server.logprobs import LegacyLogprobWriter, prompt_entries, prompt_logprob_list
from tokenspeed.server.prompts import prompts_of
from tokenspeed.server.requests import CompletionRequest
from tokenspeed.server.responses import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionResponse,
    LegacyLogprobs,
    UsageBody,
)
from tokenspeed.server.sampling import generation_request
from tokenspeed.server.stream import ChunkWriter, DisconnectWatch, GenerationStream, event
from tokenspeed.server.timings import timings_of


async def completions(request: Request) -> Response:
    """Goes on from one or more prompts, streamed or not."""
    context = context_of(request)
    body, ignored = await read_json(request, CompletionRequest, context.max_body_bytes)
    context.metrics.fields_ignored(ignored)
    context.check_model(body.model)
    request_id = request_id_of(request)
    headers = {"x-request-id": request_id}
    name = f"cmpl-{request_id}"
    prompts = _prompts(body)
    try:
        requests = [_request(context, body, prompt, request_id) for prompt in prompts]
        if body.max_tokens == 0 and body.logprobs is None and body.prompt_logprobs is None:
            generation = await context.llm.start_without_answer(requests)
        else:
            generation = await context.llm.start(requests)
        texts = [_echoed(context, body, prompt) for prompt in generation.prompts]
        if body.stream:
            return GenerationStream(generation, CompletionChunkWriter(context, body, generation, texts, name), headers)
        async with DisconnectWatch(request.receive, generation.cancel):
            return json_response(await _whole(context, body, generation, texts, name), headers=headers)
    except FrontendError as error:
        raise from_frontend(error) from error


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The request's prompts; ApiError (400) where they have too many choices together."""
    prompts = prompts_of(body.prompt, "prompt")
    choices = len(prompts) * max(body.n or 1, body.best_of or 1)
    if choices > MAX_REQUEST_CHOICES:
        raise ApiError(
            400,
            f"{choices} choices over all prompts; at most {MAX_REQUEST_CHOICES} go into one request",
            code="invalid_value",
            param="prompt",
        )
    return prompts


def _request(
    context: ServerContext, body: CompletionRequest, prompt: str | list[int], request_id: str
) -> GenerationRequest:
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0: that goes with echo: true only", code="invalid_value", param="max_tokens")
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise ApiError(
            400, "best_of above n cannot be streamed: all choices must end first", code="invalid_value", param="best_of"
        )
    logprobs = -1 if body.logprobs is None else body.logprobs
    return generation_request(
        body,
        prompt,
        context.llm.config.api.default_sampling,
        request_id=request_id,
        # log-probabilities of a prompt alone still need one step of the engine, whose token is dropped
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=logprobs,
        best_of=body.best_of,
        prompt_logprobs=logprobs if body.echo else -1,
    )


def _echoed(context: ServerContext, body: CompletionRequest, prompt: Prompt) -> str:
    """The text of the prompt, where the answer begins with it."""
    if not body.echo:
        return ""
    given = prompt.request.prompt
    if isinstance(given, str):
        return given
    return decode(context.llm.tokenizer, prompt.token_ids, prompt.request.skip_special_tokens)


async def _whole(
    context: ServerContext, body: CompletionRequest, generation: Generation, texts: Sequence[str], name: str
) -> CompletionResponse:
    results = await collect(generation)
    each = body.n or 1
    if body.max_tokens == 0:
        results = [_without_answer(index) for index in range(each * len(generation.prompts))]
        generation.usage.completion_tokens = 0
    return CompletionResponse(
        id=name,
        created=int(time.time()),
        model=body.model,
        choices=[
            _choice(context, body, generation.prompts[result.index // each], texts[result.index // each], result)
            for result in results
        ],
        usage=UsageBody.of(generation.usage),
        timings=timings_of(generation, body.return_timings),
    )


def _without_answer(index: int) -> ChoiceResult:
    return ChoiceResult(index, finish_reason="length")


def _choice(
    context: ServerContext, body: CompletionRequest, prompt: Prompt, text: str, result: ChoiceResult
) -> CompletionChoice:
    tokenizer = context.llm.tokenizer
    logprobs: LegacyLogprobs | None = None
    if body.logprobs is not None:
        writer = LegacyLogprobWriter(tokenizer)
        if body.echo:
            logprobs = writer.write([*prompt_entries(prompt), *result.logprobs], first_token=prompt.token_ids[0])
        else:
            logprobs = writer.write(result.logprobs)
    return CompletionChoice(
        index=result.index,
        text=text + result.text,
        logprobs=logprobs,
        finish_reason=result.finish_reason,
        matched_stop=result.matched_stop,
        prompt_logprobs=msgspec.UNSET if body.prompt_logprobs is None else prompt_logprob_list(tokenizer, prompt),
    )


class CompletionChunkWriter(ChunkWriter):
    """Writes the chunks of one stream of plain completions."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        generation: Generation,
        texts: Sequence[str],
        name: str,
    ) -> None:
        self._body = body
        self._generation = generation
        self._texts = texts
        self._tokenizer = context.llm.tokenizer
        self._begun: set[int] = set()
        self._legacy: dict[int, LegacyLogprobWriter] = {}
        self._chunk = CompletionChunk(
            id=name,
            created=int(time.time()),
            model=body.model,
            choices=[],
            usage=None if body.includes_usage else msgspec.UNSET,
        )
        self._encode = msgspec.json.Encoder().encode

    def deltas(self, batch: list[Delta]) -> bytes:
        return b"".join([self._events(delta) for delta in batch])

    def end(self) -> bytes:
        self._chunk.timings = timings_of(self._generation, self._body.return_timings)
        if not self._body.includes_usage and self._chunk.timings is msgspec.UNSET:
            return b""
        if self._body.max_tokens == 0:
            self._generation.usage.completion_tokens = 0
        self._chunk.choices = []
        if self._body.includes_usage:
            self._chunk.usage = UsageBody.of(self._generation.usage)
        return event(self._encode(self._chunk))

    def _events(self, delta: Delta) -> bytes:
        result = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            result = self._echo(delta.index)
        if self._body.max_tokens == 0:
            delta = Delta(index=delta.index, finish_reason="length" if delta.finish_reason else None)
        logprobs = self._logprobs(delta) if delta.logprobs else None
        if delta.text or logprobs is not None:
            result += self._event(CompletionChunkChoice(index=delta.index, text=delta.text, logprobs=logprobs))
        if delta.finish_reason is not None:
            result += self._event(
                CompletionChunkChoice(
                    index=delta.index, text="", finish_reason=delta.finish_reason, matched_stop=delta.matched_stop
                )
            )
        return result

    def _echo(self, index: int) -> bytes:
        """The prompt in front of a choice, with its log-probabilities where they were asked for."""
        if not self._body.echo:
            return b""
        at = index // (self._body.n or 1)
        prompt, logprobs = self._generation.prompts[at], None
        if self._body.logprobs is not None:
            logprobs = self._writer(index).write(prompt_entries(prompt), first_token=prompt.token_ids[0])
        return self._event(CompletionChunkChoice(index=index, text=self._texts[at], logprobs=logprobs))

    def _logprobs(self, delta: Delta) -> LegacyLogprobs | None:
        return None if self._body.logprobs is None else self._writer(delta.index).write(delta.logprobs)

    def _writer(self, index: int) -> LegacyLogprobWriter:
        if index not in self._legacy:
            self._legacy[index] = LegacyLogprobWriter(self._tokenizer)
        return self._legacy[index]

    def _event(self, choice: CompletionChunkChoice) -> bytes:
        self._chunk.choices = [choice]
        return event(self._encode(self._chunk))
