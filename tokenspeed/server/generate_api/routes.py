"""POST /generate."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.collect import ChoiceResult, collect
from tokenspeed.frontend.errors import FrontendError
from tokenspeed.frontend.generation import Generation, Prompt
from tokenspeed.frontend.request import Delta, GenerationRequest
from tokenspeed.server.body import read_json
from tokenspeed.server.context import ServerContext, context_of, json_response, request_id_of
from tokenspeed.server.errors import ApiError, from_frontend
from tokenspeed.server.generate_api.answers import AnswerWriter
from tokenspeed.server.generate_api.requests import RULES, GenerateRequest, check_choices, own_name, sampling_of
from tokenspeed.server.sampling import generation_request
from tokenspeed.server.stream import ChunkWriter, DisconnectWatch, GenerationStream, event


async def generate(request: Request) -> Response:
    """Goes on from one or more prompts, streamed or not."""
    context = context_of(request)
    body, ignored = await read_json(request, GenerateRequest, context.max_body_bytes, rules=RULES)
    request_id = request_id_of(request)
    headers = {"x-request-id": request_id}
    try:
        requests = _requests(context, body, request_id, ignored)
        context.metrics.fields_ignored(dict.fromkeys(ignored))
        generation = await context.llm.start(requests)
        several = body.is_batch or sum(one.n for one in requests) > 1
        writer = AnswerWriter(body, context.llm.tokenizer, generation)
        if body.stream:
            chunks = GenerateChunkWriter(writer, generation, several=several)
            return GenerationStream(generation, chunks, headers, own_name)
        async with DisconnectWatch(request.receive, generation.cancel):
            results = await collect(generation)
        prompts = prompts_of_choices(generation)
        answers = [writer.write(prompts[result.index], result) for result in results]
        return json_response(answers if several else answers[0], headers=headers)
    except FrontendError as error:
        raise own_name(from_frontend(error)) from error


def _requests(
    context: ServerContext, body: GenerateRequest, request_id: str, ignored: list[str]
) -> list[GenerationRequest]:
    prompts = body.prompts()
    count = len(prompts)
    top = body.top_logprobs_num or 0
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if not body.return_logprob and (top or start >= 0):
        name = "top_logprobs_num" if top else "logprob_start_len"
        raise ApiError(400, f"{name} goes with return_logprob: true", code="invalid_value", param=name)
    reads_prompt = body.return_logprob and start >= 0
    requests = []
    names = body.of_each("rid", count)
    for at, given in enumerate(body.of_each("sampling_params", count)):
        sampling = sampling_of(given, context.llm.config.served_name, ignored)
        sampling.priority, sampling.cache_salt = body.priority, body.extra_key
        try:
            requests.append(
                generation_request(
                    sampling,
                    prompts[at],
                    context.llm.config.api.default_sampling,
                    request_id=names[at] or (request_id if count == 1 else f"{request_id}-{at}"),
                    max_tokens=sampling.max_tokens,
                    logprobs=top if body.return_logprob else -1,
                    prompt_logprobs=top if reads_prompt else -1,
                )
            )
        except ApiError as error:
            raise own_name(error) from error
    check_choices([one.n for one in requests])
    return requests


def prompts_of_choices(generation: Generation) -> list[Prompt]:
    """The prompt of each choice."""
    return [prompt for prompt in generation.prompts for _ in range(prompt.request.n)]


class GenerateChunkWriter(ChunkWriter):
    """Writes each choice as it stands whenever it grew: SGLang's chunks hold all that came so far."""

    def __init__(self, writer: AnswerWriter, generation: Generation, *, several: bool) -> None:
        self._writer = writer
        self._prompts = prompts_of_choices(generation)
        self._results = [ChoiceResult(index) for index in range(len(self._prompts))]
        self._several = several
        self._encode = msgspec.json.Encoder().encode

    def deltas(self, batch: list[Delta]) -> bytes:
        ended = {delta.index: delta.finish_reason is not None for delta in batch}
        for delta in batch:
            result = self._results[delta.index]
            result.text += delta.text
            result.token_ids.extend(delta.token_ids)
            result.logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                result.finish_reason, result.matched_stop = delta.finish_reason, delta.matched_stop
        return b"".join([self._event(index, ended=ends) for index, ends in ended.items()])

    def end(self) -> bytes:
        return b""

    def _event(self, index: int, *, ended: bool) -> bytes:
        chunk = self._writer.write(self._prompts[index], self._results[index], ended=ended)
        if self._several:
            chunk.index = index
        return event(self._encode(chunk))
