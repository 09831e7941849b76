"""POST /v1/chat/completions."""

import time
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.chat_prompt import MESSAGE_CHARACTERS, ChatPrompt
from tokenspeed.frontend.collect import ChoiceResult, collect
from tokenspeed.frontend.errors import FrontendError
from tokenspeed.frontend.generation import Generation
from tokenspeed.frontend.long_texts import PromptBound
from tokenspeed.frontend.parsing.parser import Parsing
from tokenspeed.frontend.parsing.parts import CallBegun
from tokenspeed.frontend.request import Delta
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.messages import ThinkingBudget
from tokenspeed.server.body import read_json
from tokenspeed.server.calls import call_constraint, frames_answer, special_tokens
from tokenspeed.server.chat_parts import deltas_of, finish_reason_of, message_of
from tokenspeed.server.constraints import Asked, constraint_of
from tokenspeed.server.context import ServerContext, context_of, json_response, request_id_of
from tokenspeed.server.conversation import template_messages
from tokenspeed.server.errors import ApiError, from_frontend
from tokenspeed.server.logprobs import chat_logprobs, prompt_logprob_list
from tokenspeed.server.requests import ChatRequest
from tokenspeed.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatResponse,
    UsageBody,
)
from tokenspeed.server.sampling import generation_request
from tokenspeed.server.stream import ChunkWriter, DisconnectWatch, GenerationStream, event
from tokenspeed.server.thinking import reasoning_end, thinking_budget, thinking_variables
from tokenspeed.server.timings import timings_of
from tokenspeed.server.tools import offered_tools


async def chat_completions(request: Request) -> Response:
    """Goes on with a conversation, streamed or not."""
    context = context_of(request)
    body, ignored = await read_json(request, ChatRequest, context.max_body_bytes)
    context.metrics.fields_ignored(ignored)
    context.check_model(body.model)
    request_id = request_id_of(request)
    headers = {"x-request-id": request_id}
    try:
        generation = await start(context, body, request_id)
        name = f"chatcmpl-{request_id}"
        if body.stream:
            return GenerationStream(generation, ChatChunkWriter(context.llm.tokenizer, body, generation, name), headers)
        async with DisconnectWatch(request.receive, generation.cancel):
            return json_response(await _whole(context, body, generation, name), headers=headers)
    except FrontendError as error:
        raise from_frontend(error) from error


@dataclass(frozen=True)
class ChatTurn:
    """A conversation as the model reads it, and what is asked of the answer.

    Attributes:
        prompt: the rendered conversation.
        parsing: what is to be told apart in the answer.
        calls: the constraint of tools that must be called, or must conform; None where there is none.
        begin_after, opening: where a constraint begins; see reasoning_end.
        thinking: how long the reasoning may be; None is no bound.
    """

    prompt: ChatPrompt
    parsing: Parsing
    calls: Asked | None
    begin_after: str
    opening: str
    thinking: ThinkingBudget | None


async def turn_of(context: ServerContext, body: ChatRequest, bound: PromptBound | None = None) -> ChatTurn:
    """Renders the conversation of a request.

    Raises ApiError (400) for what contradicts itself or the model, RequestRefused for a prompt far beyond ``bound``.
    """
    if bound is not None:
        bound.check_messages(len(body.messages))
    formats = context.llm.config.formats
    tools = offered_tools(body.tools, body.tool_choice, tool_format=formats.tools)
    switched = thinking_variables(
        body.reasoning_effort, switch=formats.thinking_switch, reasoning_format=formats.reasoning
    )
    given = {**switched, **(body.chat_template_kwargs or {})}
    settings = template_settings(body.add_generation_prompt, body.continue_final_message)
    messages = await context.llm.desk.work(
        lambda: template_messages(body.messages), MESSAGE_CHARACTERS * len(body.messages)
    )
    prompt = await context.llm.render_chat(
        messages,
        **settings,
        variables={**given, "tools": tools} if tools else given,
        bound=bound,
    )
    calls = call_constraint(
        body.tools,
        body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        tool_format=formats.tools,
        special=special_tokens(context.llm.tokenizer) if tools else {},
        prompt_end=prompt.end,
        answer=constraint_of(body),
    )
    begin_after, opening = reasoning_end(
        formats.reasoning,
        prompt.end,
        variables=given,
        switch=formats.thinking_switch,
        continues=settings["continue_final_message"],
    )
    parsing = Parsing(
        tool_format=formats.tools,
        reasoning_format=formats.reasoning,
        tools=tools,
        parallel=body.parallel_tool_calls is not False,
        separate=body.separate_reasoning is not False,
        prompt_end=prompt.end,
        valid_calls=calls is not None,
    )
    thinking = thinking_budget(
        body.thinking_token_budget,
        parsing=parsing,
        begin_after=begin_after,
        opening=opening,
        stop_token_ids=body.stop_token_ids or (),
        tokenizer=context.llm.tokenizer,
    )
    framed = calls is not None and frames_answer(formats.tools)
    return ChatTurn(prompt, parsing, calls, "" if framed else begin_after, opening, thinking)


async def start(context: ServerContext, body: ChatRequest, request_id: str) -> Generation:
    """Has the answer to a conversation generated; the other doors' conversations come here too."""
    turn = await turn_of(context, body, context.llm.prompt_bound)
    return await context.llm.start(
        [
            generation_request(
                body,
                turn.prompt.token_ids,
                context.llm.config.api.default_sampling,
                request_id=request_id,
                max_tokens=_max_tokens(body),
                logprobs=_logprobs(body),
                parsing=turn.parsing if turn.parsing.needed else None,
                constraint=turn.calls,
                begin_after=turn.begin_after,
                opening=turn.opening,
                thinking=turn.thinking,
            )
        ]
    )


def template_settings(add_generation_prompt: bool | None, continue_final_message: bool | None) -> dict[str, bool]:
    """Returns how the template ends: with the assistant's turn opened, or with the last message left open."""
    goes_on = bool(continue_final_message)
    opens = not goes_on if add_generation_prompt is None else add_generation_prompt
    if goes_on and opens:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other",
            code="invalid_value",
            param="continue_final_message",
        )
    return {"add_generation_prompt": opens, "continue_final_message": goes_on}


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            400,
            f"max_tokens is {old} and max_completion_tokens is {new}; give one of them",
            code="invalid_value",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _logprobs(body: ChatRequest) -> int:
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise ApiError(400, "top_logprobs goes with logprobs: true", code="invalid_value", param="top_logprobs")
        return -1
    return body.top_logprobs or 0


async def _whole(context: ServerContext, body: ChatRequest, generation: Generation, name: str) -> ChatResponse:
    tokenizer = context.llm.tokenizer
    choices = [_choice(tokenizer, body, result) for result in await collect(generation)]
    return ChatResponse(
        id=name,
        created=int(time.time()),
        model=body.model,
        choices=choices,
        usage=UsageBody.of(generation.usage),
        prompt_logprobs=(
            msgspec.UNSET if body.prompt_logprobs is None else prompt_logprob_list(tokenizer, generation.prompts[0])
        ),
        timings=timings_of(generation, body.return_timings),
    )


def _choice(tokenizer: Tokenizer, body: ChatRequest, result: ChoiceResult) -> ChatChoice:
    answer = result.answer
    return ChatChoice(
        index=result.index,
        message=message_of(answer, shows_reasoning=body.include_reasoning is not False),
        logprobs=chat_logprobs(tokenizer, result.logprobs) if body.logprobs else None,
        finish_reason=finish_reason_of(result.finish_reason, bool(answer.calls)),
        matched_stop=result.matched_stop,
    )


class ChatChunkWriter(ChunkWriter):
    """Writes the chunks of one chat stream: the role once a choice, then its parts, then the reason it ended.

    Log-probabilities are those of the tokens as they were generated, whatever they became; they stand in the first
    chunk that is made of them, which may hold nothing else.
    """

    def __init__(self, tokenizer: Tokenizer, body: ChatRequest, generation: Generation, name: str) -> None:
        self._tokenizer = tokenizer
        self._logprobs = bool(body.logprobs)
        self._includes_usage = body.includes_usage
        self._return_timings = body.return_timings
        self._generation = generation
        self._parses = generation.prompts[0].request.parsing is not None
        self._shows_reasoning = body.include_reasoning is not False
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._chunk = ChatChunk(
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
        self._chunk.timings = timings_of(self._generation, self._return_timings)
        if not self._includes_usage and self._chunk.timings is msgspec.UNSET:
            return b""
        self._chunk.choices = []
        if self._includes_usage:
            self._chunk.usage = UsageBody.of(self._generation.usage)
        return event(self._encode(self._chunk))

    def _events(self, delta: Delta) -> bytes:
        result = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            result = self._event(ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content="")))
        said = self._deltas(delta)
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs) if self._logprobs else None
        if delta.logprobs and logprobs is not None and not said:
            said = [ChatDelta()]
        for one in said:
            result += self._event(ChatChunkChoice(index=delta.index, delta=one, logprobs=logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            result += self._event(
                ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(),
                    finish_reason=finish_reason_of(delta.finish_reason, delta.index in self._called),
                    matched_stop=delta.matched_stop,
                )
            )
        return result

    def _deltas(self, delta: Delta) -> list[ChatDelta]:
        if not self._parses:
            return [ChatDelta(content=delta.text)] if delta.text else []
        if any(isinstance(part, CallBegun) for part in delta.parts):
            self._called.add(delta.index)
        return deltas_of(delta.parts, shows_reasoning=self._shows_reasoning)

    def _event(self, choice: ChatChunkChoice) -> bytes:
        self._chunk.choices = [choice]
        return event(self._encode(self._chunk))
