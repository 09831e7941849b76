"""Every field that says what an answer must look like becomes one constraint, or a 400 that names it."""

import json
from typing import Any

import httpx
import pytest
from scripted_engine import MODEL, Stack, say, scripted_config

from tokenspeed.messages import MAX_CONSTRAINT_BYTES, Constraint, RequestOutput, Submit
from tokenspeed.server.app import create_app
from tokenspeed.server.constraints import CONSTRAINT_FIELDS, Asked
from tokenspeed.server.errors import ApiError
from tokenspeed.server.requests import ChatRequest, CompletionRequest, Message
from tokenspeed.server.sampling import generation_request

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"ä": {"type": "integer"}}}
TAG: dict[str, Any] = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def schema_constraint(text: str = compact(SCHEMA)) -> Constraint:
    return Constraint(kind="json_schema", text=text)


ASKED: list[tuple[dict[str, Any], Constraint]] = [
    ({"response_format": {"type": "json_object"}}, Constraint(kind="json_object")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, schema_constraint()),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": SCHEMA, "strict": True, "description": ""},
            }
        },
        schema_constraint(),
    ),
    ({"response_format": {"type": "structural_tag", **TAG}}, Constraint(kind="structural_tag", text=compact(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, schema_constraint()),
    ({"structured_outputs": {"json": '{"type": "object"}'}}, schema_constraint('{"type": "object"}')),
    ({"structured_outputs": {"json_object": True}}, Constraint(kind="json_object")),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Constraint(kind="regex", text="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint(kind="choice", text='["a","b"]')),
    ({"structured_outputs": {"grammar": "start: /a/"}}, Constraint(kind="grammar", text="start: /a/")),
    ({"structured_outputs": {"structural_tag": TAG}}, Constraint(kind="structural_tag", text=compact(TAG))),
    ({"guided_json": SCHEMA}, schema_constraint()),
    ({"guided_json": "{}"}, schema_constraint("{}")),
    ({"guided_regex": "[0-9]{3}"}, Constraint(kind="regex", text="[0-9]{3}")),
    ({"guided_choice": ["é"]}, Constraint(kind="choice", text='["é"]')),
    ({"guided_grammar": 'root ::= "a"'}, Constraint(kind="grammar", text='root ::= "a"')),
    ({"json_schema": compact(SCHEMA)}, schema_constraint()),
    ({"regex": "x|y"}, Constraint(kind="regex", text="x|y")),
    ({"ebnf": 'root ::= "a"'}, Constraint(kind="grammar", text='root ::= "a"')),
    ({"structural_tag": compact(TAG)}, Constraint(kind="structural_tag", text=compact(TAG))),
]


async def ask(client: httpx.AsyncClient, fields: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return await client.post(path, json={"model": MODEL, **prompt, **fields})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "expected"), ASKED, ids=lambda value: str(value)[:40])
async def test_every_field_becomes_a_constraint(
    client: httpx.AsyncClient, stack: Stack, path: str, fields: dict[str, Any], expected: Constraint
) -> None:
    answer = await ask(client, {**fields, "n": 2}, path)
    assert answer.status_code == 200, answer.text
    assert [submit.constraint for submit in stack.engine.submits] == [expected, expected]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None, "regex": None}])
async def test_free_text_has_none(client: httpx.AsyncClient, stack: Stack, fields: dict[str, Any]) -> None:
    assert (await ask(client, fields)).status_code == 200
    assert [submit.constraint for submit in stack.engine.submits] == [None]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": ""}, "guided_json", "empty"),
    ({"guided_regex": " "}, "guided_regex", "empty"),
    ({"ebnf": ""}, "ebnf", "empty"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json", "empty"),
    ({"structured_outputs": {}}, "structured_outputs", "must hold one of json, regex"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "holds none"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "holds 2"),
    ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark", "not a field"),
    ({"guided_choice": []}, "guided_choice", "length"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "length"),
    ({"guided_choice": "a"}, "guided_choice", "array"),
    ({"guided_json": [1]}, "guided_json", "object"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"response_format": {}}, "response_format.type", "missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be there"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "goes with"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "triggers and structures"),
    ({"response_format": {"type": "json_object", "triggers": ["a"]}}, "response_format", "triggers and structures"),
    ({"regex": "a", "ebnf": "b"}, "ebnf", "exclude each other"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "exclude each other"),
    ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "regex", "exclude each other"),
    ({"guided_regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "guided_regex", str(MAX_CONSTRAINT_BYTES)),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=lambda value: str(value)[:40])
async def test_what_makes_no_sense_names_its_field(
    client: httpx.AsyncClient, stack: Stack, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = await ask(client, fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert error["code"] == {"missing": "missing_field", "not a field": "unknown_field"}.get(said, "invalid_value")
    assert said in error["message"]
    assert stack.engine.submits == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("invalid_constraint", 400, "invalid_value"),
        ("constraint_too_costly", 400, "invalid_value"),
        ("constraint_failed", 400, "constraint_failed"),
        ("constraint_busy", 503, "constraint_busy"),
        ("constraint_unavailable", 500, "constraint_unavailable"),
    ],
)
async def test_what_the_engine_says_of_it(
    client: httpx.AsyncClient, stack: Stack, stream: bool, code: str, status: int, shown: str
) -> None:
    def refuse(submit: Submit) -> list[RequestOutput]:
        return [RequestOutput(handle=submit.handle, finish_reason="error", error="unclosed group", error_code=code)]

    stack.engine.script = refuse
    answer = await ask(client, {"guided_regex": "(a", "stream": stream, "n": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, shown)
    assert "unclosed group" in error["message"]
    assert error["param"] == ("guided_regex" if status == 400 else None)
    stack.engine.script = say("fine")
    assert (await ask(client, {})).status_code == 200


async def test_a_fulfilled_constraint_is_a_stop_without_a_match(client: httpx.AsyncClient, stack: Stack) -> None:
    stack.engine.script = lambda submit: [
        RequestOutput(handle=submit.handle, token_ids=list(b'{"a"')),
        RequestOutput(handle=submit.handle, token_ids=list(b":1}"), finish_reason="stop"),
    ]
    choice = (await ask(client, {"response_format": {"type": "json_object"}})).json()["choices"][0]
    assert choice["message"]["content"] == '{"a":1}', "the last token is text and stays"
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", None)


async def test_structured_output_may_be_off() -> None:
    stack = Stack(scripted_config(structured_output="none"))
    await stack.new_engine()
    transport = httpx.ASGITransport(create_app(stack.llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await ask(client, {"regex": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_field")
        assert "api.structured_output" in answer.json()["error"]["message"]
        assert (await ask(client, {})).status_code == 200
    await stack.close()


def test_the_list_of_fields_is_whole() -> None:
    for body in (ChatRequest, CompletionRequest):
        assert set(CONSTRAINT_FIELDS) <= set(body.__struct_fields__)


def test_a_constraint_of_tools_and_the_end_of_reasoning() -> None:
    def request(body: ChatRequest, **more: Any) -> Any:
        return generation_request(body, [1], {}, request_id="r", max_tokens=None, logprobs=-1, **more)

    message = [Message(role="user", content="x")]
    asked = Asked(Constraint(kind="grammar", text="start: /a/"), "tool_choice")
    free, own = ChatRequest(model="m", messages=message), ChatRequest(model="m", messages=message, regex="a")
    assert request(free).constraint is None
    made = request(free, constraint=asked, begin_after="</think>")
    assert made.constraint == Constraint(kind="grammar", text="start: /a/", begin_after="</think>")
    assert made.constraint_field == "tool_choice"
    assert request(own, begin_after="</think>").constraint == Constraint(kind="regex", text="a", begin_after="</think>")
    with pytest.raises(ApiError, match="regex and tool_choice exclude each other"):
        request(own, constraint=asked)
