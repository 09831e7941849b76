"""Fields of the other doors that say what an answer must look like: the same constraint, or an error by their name."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest
from app_server import serving
from fastapi import FastAPI
from named_events import named_events
from scripted_engine import MODEL, Stack, say

from tokenspeed.messages import MAX_CONSTRAINT_BYTES, Constraint, RequestOutput, Submit

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"ä": {"type": "integer"}}}
TAG: dict[str, Any] = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/generate"
OPENING: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": MODEL, "input": "hi"},
    MESSAGES: {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    GENERATE: {"text": "hi"},
}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def text(**form: Any) -> dict[str, Any]:
    return {"text": {"format": form}}


def output(**form: Any) -> dict[str, Any]:
    return {"output_config": {"format": form}}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": fields}


async def ask(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> httpx.Response:
    return await client.post(path, json={**OPENING[path], **fields})


BY_SCHEMA = Constraint(kind="json_schema", text=compact(SCHEMA))
ASKED: list[tuple[str, dict[str, Any], Constraint | None]] = [
    (RESPONSES, text(type="text"), None),
    (RESPONSES, text(type="json_object"), Constraint(kind="json_object")),
    (RESPONSES, text(type="json_schema", name="x", schema=SCHEMA), BY_SCHEMA),
    (RESPONSES, text(type="json_schema", name="x", schema=SCHEMA, strict=False, description="of it"), BY_SCHEMA),
    (MESSAGES, {"output_config": {"format": None}}, None),
    (MESSAGES, output(type="json_schema", schema=SCHEMA), BY_SCHEMA),
    (GENERATE, sampling(json_schema=None, regex=None), None),
    (GENERATE, sampling(json_schema=compact(SCHEMA)), BY_SCHEMA),
    (GENERATE, sampling(json_schema=SCHEMA), BY_SCHEMA),
    (GENERATE, sampling(regex="[0-9]{3}"), Constraint(kind="regex", text="[0-9]{3}")),
    (GENERATE, sampling(ebnf='root ::= "a"'), Constraint(kind="grammar", text='root ::= "a"')),
    (GENERATE, sampling(structural_tag=compact(TAG)), Constraint(kind="structural_tag", text=compact(TAG))),
]


@pytest.mark.parametrize(("path", "fields", "expected"), ASKED, ids=lambda value: str(value)[:60])
async def test_every_field_becomes_a_constraint(
    client: httpx.AsyncClient, stack: Stack, path: str, fields: dict[str, Any], expected: Constraint | None
) -> None:
    answer = await ask(client, path, fields)
    assert answer.status_code == 200, answer.text
    assert [submit.constraint for submit in stack.engine.submits] == [expected]


async def test_each_prompt_of_generate_has_its_own(client: httpx.AsyncClient, stack: Stack) -> None:
    fields = {"text": ["a", "b", "c"], "sampling_params": [{"regex": "a"}, {}, {"ebnf": "start: /a/", "n": 1}]}
    assert (await ask(client, GENERATE, fields)).status_code == 200
    assert [submit.constraint for submit in stack.engine.submits] == [
        Constraint(kind="regex", text="a"),
        None,
        Constraint(kind="grammar", text="start: /a/"),
    ]


LONG = {"type": "string", "const": "a" * MAX_CONSTRAINT_BYTES}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (RESPONSES, text(type="xml"), "text.format.type", "xml"),
    (RESPONSES, text(), "text.format.type", "missing"),
    (RESPONSES, text(type="json_schema", name="x"), "text.format.schema", "missing"),
    (RESPONSES, text(type="json_schema", name="x", schema=[]), "text.format.schema", "object"),
    (RESPONSES, text(type="json_schema", json_schema={}), "text.format.json_schema", "not a field"),
    (RESPONSES, text(type="json_object", schema=SCHEMA), "text.format.schema", "goes with type json_schema"),
    (RESPONSES, text(type="text", name="x"), "text.format.name", "goes with type json_schema"),
    (RESPONSES, text(type="json_schema", name="x", schema=LONG), "text.format.schema", str(MAX_CONSTRAINT_BYTES)),
    (MESSAGES, output(type="json_object"), "output_config.format.type", "json_object"),
    (MESSAGES, output(type="json_schema"), "output_config.format.schema", "missing"),
    (MESSAGES, output(type="json_schema", schema=SCHEMA, name="x"), "output_config.format.name", "not a field"),
    (MESSAGES, output(type="json_schema", schema=LONG), "output_config.format.schema", str(MAX_CONSTRAINT_BYTES)),
    (MESSAGES, {"output_format": {"type": "json_schema"}}, "output_format", "send output_config.format"),
    (GENERATE, sampling(regex=" "), "sampling_params.regex", "empty"),
    (GENERATE, sampling(json_schema=[1]), "sampling_params.json_schema", "object"),
    (GENERATE, sampling(regex="a", ebnf="b"), "sampling_params.ebnf", "exclude each other"),
    (GENERATE, sampling(json_schema=LONG), "sampling_params.json_schema", str(MAX_CONSTRAINT_BYTES)),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "param", "said"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_makes_no_sense_names_its_field(
    client: httpx.AsyncClient, stack: Stack, path: str, fields: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    answer = await ask(client, path, {**fields, "stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert param in error["message"] and said in error["message"]
    if path != MESSAGES:
        assert error["param"] == param
    assert stack.engine.submits == []


NAMED = [
    (RESPONSES, text(type="json_object"), "text.format"),
    (RESPONSES, text(type="json_schema", name="x", schema=SCHEMA), "text.format.schema"),
    (MESSAGES, output(type="json_schema", schema=SCHEMA), "output_config.format.schema"),
    (GENERATE, sampling(regex="(a"), "sampling_params.regex"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "field"), NAMED, ids=lambda value: str(value)[:60])
async def test_what_the_engine_says_of_it(
    client: httpx.AsyncClient, stack: Stack, path: str, fields: dict[str, Any], field: str, stream: bool
) -> None:
    stack.engine.script = refuse
    answer = await ask(client, path, {**fields, "stream": stream})
    assert answer.status_code == 400, "a stream has not begun yet"
    error = answer.json()["error"]
    assert error["message"] == f"{field}: unclosed group"
    if path != MESSAGES:
        assert (error["param"], error["code"]) == (field, "invalid_value")


@pytest.mark.parametrize(("path", "fields", "field"), NAMED, ids=lambda value: str(value)[:60])
async def test_a_dead_end_in_mid_stream(
    client: httpx.AsyncClient, stack: Stack, path: str, fields: dict[str, Any], field: str
) -> None:
    stack.engine.script = lambda submit: [
        RequestOutput(handle=submit.handle, token_ids=list(b"{")),
        *refuse(submit, "constraint_failed"),
    ]
    answer = await ask(client, path, {**fields, "stream": True})
    assert answer.status_code == 200 and f'"{field}: unclosed group"' in answer.text


def refuse(submit: Submit, code: str = "invalid_constraint") -> list[RequestOutput]:
    return [RequestOutput(handle=submit.handle, finish_reason="error", error="unclosed group", error_code=code)]


async def test_a_response_says_what_was_asked(client: httpx.AsyncClient, stack: Stack) -> None:
    stack.engine.script = say('{"ä":1}')
    plain = (await ask(client, RESPONSES, {})).json()
    assert plain["text"] == {"format": {"type": "text"}}
    asked = text(type="json_schema", name="x", schema=SCHEMA)
    whole = (await ask(client, RESPONSES, asked)).json()
    expected = {"type": "json_schema", "name": "x", "description": None, "schema": SCHEMA, "strict": True}
    assert whole["text"] == {"format": expected}
    assert (await ask(client, RESPONSES, text(type="json_object"))).json()["text"] == {
        "format": {"type": "json_object"}
    }
    streamed = named_events((await ask(client, RESPONSES, {**asked, "stream": True})).text, ends_with_done=True)
    assert streamed[-1]["response"]["text"] == {"format": expected}


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_clients_parse_what_they_asked_for(app: FastAPI, stack: Stack) -> None:
    stack.engine.script = say('{"name": "Ada", "age": 36}')
    ada = Person(name="Ada", age=36)
    async with serving(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            response = await client.responses.parse(model=MODEL, input="Who?", text_format=Person)
            assert response.output_parsed == ada
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other:
            message = await other.messages.parse(
                model=MODEL, max_tokens=64, messages=[{"role": "user", "content": "Who?"}], output_format=Person
            )
            assert message.parsed_output == ada
    asked = [json.loads(submit.constraint.text) for submit in stack.engine.submits if submit.constraint]
    assert [schema["required"] for schema in asked] == [["name", "age"]] * 2
