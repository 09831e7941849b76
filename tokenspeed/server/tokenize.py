"""POST /tokenize and /detokenize."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.chat_prompt import MESSAGE_CHARACTERS
from tokenspeed.frontend.errors import FrontendError
from tokenspeed.frontend.tokenizer import decode
from tokenspeed.server.body import read_json
from tokenspeed.server.chat import template_settings
from tokenspeed.server.context import ServerContext, context_of, json_response
from tokenspeed.server.conversation import template_messages
from tokenspeed.server.errors import ApiError, from_frontend
from tokenspeed.server.requests import DetokenizeRequest, TokenizeRequest
from tokenspeed.server.responses import DetokenizeResponse, TokenizeResponse
from tokenspeed.server.tools import offered_tools

_CHARACTERS = 4
"""What the name or the text of a token costs, in characters that are tokenized."""


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as the template writes it."""
    context = context_of(request)
    body, ignored = await read_json(request, TokenizeRequest, context.max_body_bytes)
    context.metrics.fields_ignored(ignored)
    if body.model is not None:
        context.check_model(body.model)
    ids = await _ids(context, body)
    names: list[str] | msgspec.UnsetType = msgspec.UNSET
    if body.return_token_strs:
        name = context.llm.tokenizer.token_name
        names = await context.llm.desk.work(lambda: [name(token_id) for token_id in ids], _CHARACTERS * len(ids))
    return json_response(
        TokenizeResponse(count=len(ids), max_model_len=context.llm.max_model_len, tokens=ids, token_strs=names)
    )


async def _ids(context: ServerContext, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", code="invalid_value", param="prompt")
    if body.prompt is not None and body.tools:
        raise ApiError(400, "tools go with messages, not with a prompt", code="invalid_value", param="tools")
    if body.prompt is not None:
        adds = body.add_special_tokens is None or body.add_special_tokens
        return await context.llm.encode(body.prompt, add_special_tokens=adds)
    tools = offered_tools(body.tools, None, tool_format=context.llm.config.formats.tools)
    given = body.chat_template_kwargs or {}
    try:
        messages = body.messages or []
        return await context.llm.chat_prompt(
            await context.llm.desk.work(lambda: template_messages(messages), MESSAGE_CHARACTERS * len(messages)),
            **template_settings(body.add_generation_prompt, body.continue_final_message),
            variables={**given, "tools": tools} if tools else given,
        )
    except FrontendError as error:
        raise from_frontend(error) from error


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context = context_of(request)
    body, ignored = await read_json(request, DetokenizeRequest, context.max_body_bytes)
    context.metrics.fields_ignored(ignored)
    if body.model is not None:
        context.check_model(body.model)
    size = context.llm.model.vocab_size
    wrong = next((token_id for token_id in body.tokens if token_id >= size), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"tokens names {wrong}, but the vocabulary has the ids 0 to {size - 1}",
            code="invalid_value",
            param="tokens",
        )
    text = await context.llm.desk.work(
        lambda: decode(context.llm.tokenizer, body.tokens, bool(body.skip_special_tokens)),
        _CHARACTERS * len(body.tokens),
    )
    return json_response(DetokenizeResponse(text))
