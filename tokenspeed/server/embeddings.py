"""POST /v1/embeddings: says that the served model gives none."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.server.body import read_json
from tokenspeed.server.context import context_of
from tokenspeed.server.errors import ApiError
from tokenspeed.server.requests import TokenId


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields; ``input`` is a text, token ids, or a list of either."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


async def embeddings(request: Request) -> Response:
    """Checks the request and refuses it: the engine generates text and hands out no hidden states."""
    context = context_of(request)
    body, ignored = await read_json(request, EmbeddingsRequest, context.max_body_bytes)
    context.metrics.fields_ignored(ignored)
    context.check_model(body.model)
    raise ApiError(
        400,
        f"{body.model!r} gives no embeddings: it is served to generate text, and this version of the engine has no "
        "pooling, neither mean nor last; use a server for embedding models beside this one",
        code="embeddings_not_supported",
        param="model",
    )
