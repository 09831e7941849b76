"""POST /v1/embeddings: a vector for each text, pooled by the engine, cut and normalised here."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.collect import collect
from tokenspeed.frontend.embedding_rules import KEY, EmbeddingRules
from tokenspeed.frontend.errors import FrontendError
from tokenspeed.frontend.request import GenerationRequest
from tokenspeed.server.body import ClientGone, read_json
from tokenspeed.server.context import ServerContext, context_of, json_response, request_id_of
from tokenspeed.server.deadline import time_left
from tokenspeed.server.errors import ApiError, from_frontend
from tokenspeed.server.fields import WITHOUT_EFFECT, FieldRules
from tokenspeed.server.prompts import prompts_of
from tokenspeed.server.requests import TokenId
from tokenspeed.server.stream import DisconnectWatch

MAX_INPUTS = 2048
"""The most inputs of one request; OpenAI's own bound."""

THREAD_ABOVE_NUMBERS = 1 << 16
"""More numbers are written on a worker thread, so that the event loop goes on serving streams."""

RULES = FieldRules(
    without_effect={name: WITHOUT_EFFECT[name] for name in ("user", "metadata", "safety_identifier", "service_tier")},
    refused={
        "messages": "send the text as input; /tokenize writes a conversation as the model's template does",
        "input_type": "write the instruction into the text, as the model's card says",
        "prompt_name": "write the instruction into the text, as the model's card says",
        "truncate": "an input is never cut; shorten it",
        "truncate_prompt_tokens": "an input is never cut; shorten it",
        "add_special_tokens": "a text gets the tokens that the model wants around it; send token ids for others",
        "normalize": "the recipe says whether vectors are normalised (api.embeddings.normalize)",
        "lora_path": "adapters are not supported by this version",
    },
    harmless={"truncate": ("NONE", False), "add_special_tokens": (True,)},
)


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, and three of ours; ``input`` is a text, token ids, or a list of either."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """``embedding``: numbers, or base64 of them as float32 in little-endian order."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embeddings(request: Request) -> Response:
    """The vectors of one or more inputs, in their order."""
    context = context_of(request)
    body, ignored = await read_json(request, EmbeddingsRequest, context.max_body_bytes, rules=RULES)
    context.metrics.fields_ignored(ignored)
    context.check_model(body.model)
    request_id = request_id_of(request)
    rules = context.llm.embeddings
    _check(context, body, rules)
    requests = _requests(body, rules, request_id)
    try:
        generation = await context.llm.start(requests)
        async with DisconnectWatch(request.receive, generation.cancel):
            await collect(generation)
        if generation.cancelled:
            raise ClientGone
    except FrontendError as error:
        raise from_frontend(error) from error
    usage = EmbeddingUsage(generation.usage.prompt_tokens, generation.usage.prompt_tokens)
    pooled = [prompt.embedding for prompt in generation.prompts]
    headers = {"x-request-id": request_id}
    if len(pooled) * rules.size <= THREAD_ABOVE_NUMBERS:
        return json_response(_answer(body, rules, pooled, usage), headers=headers)
    return await asyncio.to_thread(lambda: json_response(_answer(body, rules, pooled, usage), headers=headers))


def _check(context: ServerContext, body: EmbeddingsRequest, rules: EmbeddingRules) -> None:
    if rules.pooling is None:
        raise ApiError(
            400,
            f"{body.model!r} gives no embeddings: {rules.refusal}. If it was trained for that, {KEY} in its recipe "
            "(--embedding-pooling) allows it: last or mean",
            code="embeddings_not_supported",
            param="model",
        )
    if body.dimensions is not None and not rules.allows(body.dimensions):
        sizes = context.llm.config.api.embeddings.dimensions
        others = f"{sizes}, up to {rules.size}" if sizes else f"only {rules.size}: it was not trained for others"
        raise ApiError(
            400,
            f"dimensions is {body.dimensions}, and {body.model!r} gives {others} (api.embeddings.dimensions)",
            code="invalid_value",
            param="dimensions",
        )


def _requests(body: EmbeddingsRequest, rules: EmbeddingRules, request_id: str) -> list[GenerationRequest]:
    inputs = prompts_of(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise ApiError(
            400,
            f"input has {len(inputs)} entries; at most {MAX_INPUTS} go into one request",
            code="invalid_value",
            param="input",
        )
    is_list = isinstance(body.input, list) and not isinstance(body.input[0], int)
    return [
        GenerationRequest(
            prompt=prompt,
            prompt_field=f"input[{at}]" if is_list else "input",
            request_id=request_id,
            pooling=rules.pooling,
            max_tokens=1,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            timeout_s=time_left(body.timeout),
        )
        for at, prompt in enumerate(inputs)
    ]


def _answer(
    body: EmbeddingsRequest, rules: EmbeddingRules, pooled: Sequence[bytes], usage: EmbeddingUsage
) -> EmbeddingsResponse:
    vectors = finished(pooled, body.dimensions or rules.size, normalize=rules.normalize)
    data = [
        Embedding(
            index=index,
            embedding=base64.b64encode(vector.tobytes()).decode()
            if body.encoding_format == "base64"
            else vector.tolist(),
        )
        for index, vector in enumerate(vectors)
    ]
    return EmbeddingsResponse(data=data, model=body.model, usage=usage)


def finished(pooled: Sequence[bytes], dimensions: int, *, normalize: bool) -> NDArray[np.float32]:
    """Float32 [n, dimensions], little-endian: the first elements of the engine's vectors, of length 1 where asked."""
    vectors = np.stack([np.frombuffer(vector, "<f4")[:dimensions] for vector in pooled])
    if not normalize:
        return vectors
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    cut: NDArray[np.float32] = (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype("<f4")
    return cut
