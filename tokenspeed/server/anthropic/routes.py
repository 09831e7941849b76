"""POST /v1/messages and /v1/messages/count_tokens."""

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.collect import collect
from tokenspeed.frontend.generation import Generation
from tokenspeed.server import chat
from tokenspeed.server.anthropic.answers import MessageBody, TokenCount, UsageBody, block_of, stop_of
from tokenspeed.server.anthropic.events import MessageWriter
from tokenspeed.server.anthropic.requests import RULES, CountTokensRequest, MessagesRequest
from tokenspeed.server.anthropic.translate import NAMES, chat_fields
from tokenspeed.server.body import read_json
from tokenspeed.server.context import ServerContext, context_of, json_response, request_id_of
from tokenspeed.server.errors import ApiError
from tokenspeed.server.requests import ChatRequest
from tokenspeed.server.segments import SegmentReader
from tokenspeed.server.stream import DisconnectWatch, GenerationStream
from tokenspeed.server.timings import timings_of
from tokenspeed.server.turns import chat_request, own_names, renamed


async def messages(request: Request) -> Response:
    """The next message of a conversation, streamed or not."""
    context = context_of(request)
    body, ignored = await read_json(request, MessagesRequest, context.max_body_bytes, rules=RULES)
    context.check_model(body.model)
    request_id = request_id_of(request)
    headers = {"x-request-id": request_id, "request-id": request_id}
    name = f"msg_{request_id}"
    with own_names(NAMES):
        context.llm.prompt_bound.check_messages(len(body.messages))
        generation = await chat.start(context, _as_chat(context, body, ignored), request_id)
        if body.stream:
            writer = MessageWriter(generation, name=name, model=body.model, return_timings=body.return_timings)
            return GenerationStream(generation, writer, headers, _own_name)
        async with DisconnectWatch(request.receive, generation.cancel):
            return json_response(await _whole(generation, name, body), headers=headers)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a message has."""
    context = context_of(request)
    body, ignored = await read_json(request, CountTokensRequest, context.max_body_bytes, rules=RULES)
    context.check_model(body.model)
    with own_names(NAMES):
        turn = await chat.turn_of(context, _as_chat(context, body, ignored))
        return json_response(TokenCount(len(turn.prompt.token_ids)))


def _as_chat(context: ServerContext, body: CountTokensRequest, ignored: list[str]) -> ChatRequest:
    formats = context.llm.config.formats
    fields = chat_fields(body, ignored, switchable=bool(formats.thinking_switch), reasons=bool(formats.reasoning))
    context.metrics.fields_ignored(dict.fromkeys(ignored))
    return chat_request(fields)


def _own_name(error: ApiError) -> ApiError:
    return renamed(error, NAMES)


async def _whole(generation: Generation, name: str, body: MessagesRequest) -> MessageBody:
    (result,) = await collect(generation)
    reader = SegmentReader(generation)
    reader.take(result.as_delta())
    reason, sequence = stop_of(result.finish_reason, result.matched_stop, called=reader.called)
    return MessageBody(
        id=name,
        model=body.model,
        content=[block_of(segment) for segment in reader.segments],
        stop_reason=reason,
        stop_sequence=sequence,
        usage=UsageBody.of(generation.usage),
        timings=timings_of(generation, body.return_timings),
    )
