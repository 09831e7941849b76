"""POST /v1/responses, and what became of earlier ones: GET and DELETE /v1/responses/{id}, GET …/input_items."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.collect import collect
from tokenspeed.frontend.generation import Generation
from tokenspeed.server import chat
from tokenspeed.server.body import read_json
from tokenspeed.server.context import ServerContext, context_of, json_response, key_name_of, request_id_of
from tokenspeed.server.errors import ApiError
from tokenspeed.server.responses_api.answers import Deleted, ItemList, ResponseBody
from tokenspeed.server.responses_api.draft import Draft
from tokenspeed.server.responses_api.events import ResponseWriter
from tokenspeed.server.responses_api.items import read_items
from tokenspeed.server.responses_api.requests import RULES, ResponsesRequest
from tokenspeed.server.responses_api.store import StoredResponse
from tokenspeed.server.responses_api.translate import NAMES, chat_fields
from tokenspeed.server.segments import SegmentReader
from tokenspeed.server.stream import DisconnectWatch, GenerationStream
from tokenspeed.server.turns import chat_request, own_names, renamed

MOST_LISTED = 100
QUERIES: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
"""What a list of items may be asked with."""


async def create(request: Request) -> Response:
    """Goes on with a conversation, streamed or not."""
    context = context_of(request)
    body, ignored = await read_json(request, ResponsesRequest, context.max_body_bytes, rules=RULES)
    context.check_model(body.model)
    request_id = request_id_of(request)
    headers = {"x-request-id": request_id}
    _check_store(context, body)
    owner = key_name_of(request)
    with own_names(NAMES):
        context.llm.prompt_bound.check_messages(0 if isinstance(body.input, str) else len(body.input))
    items = read_items(body.input, ignored)
    history = [*_earlier(context, body.previous_response_id, owner), *items]
    with own_names(NAMES):
        asked = chat_request(chat_fields(body, history, ignored))
        context.metrics.fields_ignored(dict.fromkeys(ignored))
        generation = await chat.start(context, asked, request_id)
    defaults = context.llm.config.api.default_sampling
    draft = Draft(body, context.responses, owner=owner, input_items=items, history=history, defaults=defaults)
    if body.stream:
        return GenerationStream(generation, ResponseWriter(draft, generation), headers, _own_name)
    with own_names(NAMES):
        async with DisconnectWatch(request.receive, generation.cancel):
            return json_response(await _whole(draft, generation), headers=headers)


def _own_name(error: ApiError) -> ApiError:
    return renamed(error, NAMES)


async def retrieve(request: Request) -> Response:
    """An earlier response, as it was answered."""
    if request.query_params.get("stream") == "true":
        raise ApiError(
            400,
            "stream is not supported: an answer is streamed to the request that asks for it",
            code="unsupported_field",
            param="stream",
        )
    return Response(_stored(request).response, media_type="application/json")


async def delete(request: Request) -> Response:
    """Forgets an earlier response; those that went on from it stay whole."""
    _stored(request)
    name = request.path_params["response_id"]
    context_of(request).responses.delete(name, key_name_of(request))
    return json_response(Deleted(id=name))


async def input_items(request: Request) -> Response:
    """The items that an earlier response was asked with, the newest first unless ``order=asc``."""
    items: list[dict[str, Any]] = msgspec.json.decode(_stored(request).input_items)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order!r}; it must be asc or desc", code="invalid_value", param="order")
    if order == "desc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        at = next((at for at, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise ApiError(400, f"after is {after!r}, which is no item of it", code="invalid_value", param="after")
        items = items[at + 1 :]
    limit = _limit(request.query_params.get("limit", "20"))
    shown = items[:limit]
    return json_response(
        ItemList(
            data=shown,
            first_id=shown[0]["id"] if shown else None,
            last_id=shown[-1]["id"] if shown else None,
            has_more=len(items) > limit,
        )
    )


def _limit(given: str) -> int:
    if not (given.isascii() and given.isdigit() and 1 <= int(given) <= MOST_LISTED):
        text = f"limit is {given!r}; it must be 1 to {MOST_LISTED}"
        raise ApiError(400, text, code="invalid_value", param="limit")
    return int(given)


def _stored(request: Request) -> StoredResponse:
    name = request.path_params["response_id"]
    stored = context_of(request).responses.get(name, key_name_of(request))
    if stored is None:
        raise ApiError(404, _gone(name), code="not_found", param="response_id")
    return stored


def _check_store(context: ServerContext, body: ResponsesRequest) -> None:
    if body.store and not context.responses.is_on:
        raise ApiError(
            400,
            "store is true, and this server keeps no responses (api.response_store_count and api.response_store_bytes "
            "say how many); leave it out, and send the whole conversation as input",
            code="unsupported_field",
            param="store",
        )


def _earlier(context: ServerContext, name: str | None, owner: str) -> list[dict[str, Any]]:
    """The conversation that a request goes on from."""
    if name is None:
        return []
    stored = context.responses.get(name, owner)
    if stored is None:
        raise ApiError(400, _gone(name), code="previous_response_not_found", param="previous_response_id")
    items: list[dict[str, Any]] = msgspec.json.decode(stored.history)
    return items


def _gone(name: str) -> str:
    return (
        f"there is no response {name!r}: it was never kept (store: false, or a server that keeps none), was deleted, "
        "was dropped for newer ones, or belongs to another API key; send the conversation as input"
    )


async def _whole(draft: Draft, generation: Generation) -> ResponseBody:
    (result,) = await collect(generation)
    reader = SegmentReader(generation)
    reader.take(result.as_delta())
    draft.end(reader, result.finish_reason, generation)
    return draft.body
