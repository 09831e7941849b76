"""/v1/embeddings over the scripted engine, whose vectors are a prompt's last token and then 1, 2, 3 ..."""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from app_server import serving
from fastapi import FastAPI
from scripted_engine import CONTEXT, HIDDEN, MODEL, VOCABULARY, Stack, scripted_config

from tokenspeed.messages import RequestOutput, Submit
from tokenspeed.server.embeddings import MAX_INPUTS, finished

COUNTED = list(range(1, HIDDEN))


@pytest.fixture
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A model that gives embeddings, as they are, or as the test's parameter says."""
    embeddings = getattr(request, "param", {"pooling": "last", "normalize": False, "dimensions": "2-4, 8"})
    stack = Stack(scripted_config(embeddings=embeddings))
    await stack.new_engine()
    yield stack
    await stack.close()


async def embed(client: httpx.AsyncClient, given: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": given, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def refused(client: httpx.AsyncClient, given: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": given, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("Hi", [[256, 72, 105]]),
        (["Hi", "é"], [[256, 72, 105], [256, 0xC3, 0xA9]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_four_kinds_of_input(stack: Stack, client: httpx.AsyncClient, given: Any, sent: list[list[int]]) -> None:
    body = await embed(client, given)
    assert list(body) == ["object", "data", "model", "usage"] and (body["object"], body["model"]) == ("list", MODEL)
    assert body["data"] == [
        {"object": "embedding", "index": at, "embedding": [float(ids[-1]), *COUNTED]} for at, ids in enumerate(sent)
    ]
    count = sum(map(len, sent))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    submits = stack.engine.submits
    assert [memoryview(submit.prompt).cast("i").tolist() for submit in submits] == sent
    assert {(submit.pooling, submit.max_new_tokens, submit.declared) for submit in submits} == {("last", 1, True)}


async def test_base64_is_the_same_numbers(client: httpx.AsyncClient) -> None:
    numbers = await embed(client, ["a", "b"], encoding_format="float")
    texts = await embed(client, ["a", "b"], encoding_format="base64")
    for one, other in zip(numbers["data"], texts["data"], strict=True):
        assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == one["embedding"]


@pytest.mark.parametrize("stack", [{"pooling": "mean", "dimensions": "2-4, 8"}], indirect=True)
async def test_vectors_are_cut_and_then_normalised(stack: Stack, client: httpx.AsyncClient) -> None:
    """The recipe normalises unless it says otherwise; the cut vector has length 1 too."""
    for dimensions in (None, HIDDEN, 8, 3):
        (item,) = (await embed(client, [[3]], dimensions=dimensions))["data"]
        raw = np.array([3.0, *COUNTED][: dimensions or HIDDEN])
        assert np.abs(np.array(item["embedding"]) - raw / np.linalg.norm(raw)).max() < 1e-7
    assert {submit.pooling for submit in stack.engine.submits} == {"mean"}


def test_a_vector_of_zeros_stays_one() -> None:
    zeros = np.zeros(4, "<f4").tobytes()
    assert finished([zeros], 3, normalize=True).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dimensions", [1, 5, 9, HIDDEN + 1])
async def test_dimensions_that_the_model_was_not_trained_for(client: httpx.AsyncClient, dimensions: int) -> None:
    error = await refused(client, "x", dimensions=dimensions)
    assert (error["param"], error["code"]) == ("dimensions", "invalid_value")
    assert "2-4, 8" in error["message"] and str(HIDDEN) in error["message"] and str(dimensions) in error["message"]


@pytest.mark.parametrize("stack", [{"pooling": "last"}], indirect=True)
async def test_a_model_without_other_sizes_has_its_own(client: httpx.AsyncClient) -> None:
    assert len((await embed(client, "x", dimensions=HIDDEN))["data"][0]["embedding"]) == HIDDEN
    error = await refused(client, "x", dimensions=8)
    assert "only 16" in error["message"] and "api.embeddings.dimensions" in error["message"]


@pytest.mark.parametrize("stack", [{}, {"pooling": "none"}], indirect=True)
async def test_a_model_that_gives_none(stack: Stack, client: httpx.AsyncClient) -> None:
    error = await refused(client, "x")
    assert (error["param"], error["code"]) == ("model", "embeddings_not_supported")
    assert "api.embeddings.pooling" in error["message"] and "--embedding-pooling" in error["message"]
    assert stack.engine.submits == []


@pytest.mark.parametrize(
    ("given", "param", "code", "says"),
    [
        ([], "input", "invalid_value", "empty"),
        ("", "input", "empty_prompt", "input is empty"),
        (["a", ""], "input[1]", "empty_prompt", "input[1] is empty"),
        ([[1], []], "input[1]", "empty_prompt", "input[1] is empty"),
        ([1, "a"], "input", "invalid_value", "mixes"),
        ([[1], [VOCABULARY]], "input[1]", "invalid_value", str(VOCABULARY)),
        (["a", "x" * CONTEXT], "input[1]", "context_length_exceeded", str(CONTEXT + 1)),
        ([1] * CONTEXT, "input", "context_length_exceeded", str(CONTEXT)),
        (["a"] * (MAX_INPUTS + 1), "input", "invalid_value", str(MAX_INPUTS)),
        ({"text": "a"}, "input", "invalid_value", "object"),
        (None, "input", "invalid_value", "null"),
    ],
)
async def test_inputs_that_cannot_be(
    stack: Stack, client: httpx.AsyncClient, given: Any, param: str, code: str, says: str
) -> None:
    error = await refused(client, given)
    assert (error["param"], error["code"]) == (param, code) and says in error["message"]
    assert stack.engine.submits == []


async def test_the_longest_input_and_the_most_inputs(stack: Stack, client: httpx.AsyncClient) -> None:
    assert (await embed(client, [1] * (CONTEXT - 1)))["usage"]["prompt_tokens"] == CONTEXT - 1
    assert len((await embed(client, [[7]] * MAX_INPUTS, encoding_format="base64"))["data"]) == MAX_INPUTS


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimension": 4}, "dimension", "unknown_field"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_field"),
        ({"input_type": "query"}, "input_type", "unsupported_field"),
        ({"stream": True}, "stream", "unknown_field"),
    ],
)
async def test_fields_that_it_does_not_take(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str
) -> None:
    error = await refused(client, "x", **fields)
    assert (error["param"], error["code"]) == (param, code)


async def test_fields_that_reach_the_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    await embed(client, "x", priority=3, cache_salt="mine", timeout=9, user="ann")
    (submit,) = stack.engine.submits
    assert (submit.priority, submit.namespace) == (3, b"mine")
    ignored = (await client.get("/metrics")).text
    assert 'field="user"' in ignored


async def test_an_engine_that_gives_up_on_one_input(stack: Stack, client: httpx.AsyncClient) -> None:
    """All end with the error, and the others are not worked on any more."""

    def script(submit: Submit) -> Iterator[RequestOutput]:
        if submit.handle == 2:
            yield RequestOutput(handle=2, finish_reason="error", error="no numbers", error_code="nan_logits")

    stack.engine.script = script
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b", "c"]})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "nan_logits"
    await stack.engine.heard(lambda: len(stack.engine.aborts) == 2)
    assert stack.llm.open_choices == 0 and stack.llm.waiting_choices == 0


async def test_a_client_that_leaves_frees_its_inputs(stack: Stack, url: str) -> None:
    stack.engine.script = lambda submit: iter(())
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": ["a", "b"]}))
        await stack.engine.heard(lambda: len(stack.engine.submits) == 2)
        asking.cancel()
    await stack.engine.heard(lambda: len(stack.engine.aborts) == 2)
    assert stack.llm.open_choices == 0


async def test_the_official_client(app: FastAPI) -> None:
    """It asks for base64 unless it is told otherwise, and gives numbers."""
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model=MODEL, input=["Hi", "you"], dimensions=3, user="ann")
        plain = await client.embeddings.create(model=MODEL, input=["Hi", "you"], dimensions=3, encoding_format="float")
    assert [item.embedding for item in answer.data] == [[105.0, 1.0, 2.0], [117.0, 1.0, 2.0]]
    assert [item.embedding for item in plain.data] == [item.embedding for item in answer.data]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 7
    assert [item.index for item in answer.data] == [0, 1]


async def test_the_page_describes_request_and_answer(client: httpx.AsyncClient) -> None:
    route = (await client.get("/openapi.json")).json()["paths"]["/v1/embeddings"]["post"]
    asked = route["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"model", "input", "encoding_format", "dimensions", "priority", "cache_salt", "timeout"} == set(asked)
    answered = route["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
    assert set(answered) == {"object", "data", "model", "usage"}
