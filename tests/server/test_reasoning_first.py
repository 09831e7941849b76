"""Where the model reasons first, what an answer must look like begins behind the reasoning, at every door."""

from typing import Any

import pytest
from parsing_server import FORMATS, ParsingServer, parsing_server
from scripted_engine import MODEL

from tokenspeed.messages import Constraint

SCHEMA: dict[str, Any] = {"type": "object"}
USER = [{"role": "user", "content": "Hi"}]
FORM = {"type": "json_schema", "schema": SCHEMA}
ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"reasoning_effort": "none"},
    ),
    (
        "/v1/messages",
        {"messages": USER, "max_tokens": 9, "output_config": {"format": FORM}},
        {"thinking": {"type": "disabled"}},
    ),
    ("/v1/responses", {"input": "Hi", "text": {"format": FORM}}, {"reasoning": {"effort": "none"}}),
]


async def constraint_of(server: ParsingServer, path: str, fields: dict[str, Any]) -> Constraint | None:
    answer = await server.client.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return server.stack.engine.submits[-1].constraint


@pytest.mark.parametrize(("path", "fields", "off"), ASKED, ids=lambda value: str(value)[:20])
async def test_the_constraint_begins_behind_the_reasoning(
    path: str, fields: dict[str, Any], off: dict[str, Any]
) -> None:
    async with parsing_server(*FORMATS) as server:
        server.say("<think>Well.</think>{}")
        thinking = Constraint(kind="json_schema", text='{"type":"object"}', begin_after="</think>", opening="<think>")
        assert await constraint_of(server, path, fields) == thinking
        assert await constraint_of(server, path, {**fields, **off}) == Constraint(
            kind="json_schema", text=thinking.text
        )


@pytest.mark.parametrize(("path", "fields", "off"), ASKED, ids=lambda value: str(value)[:20])
async def test_a_model_that_does_not_reason_begins_at_once(
    path: str, fields: dict[str, Any], off: dict[str, Any]
) -> None:
    async with parsing_server("hermes", "", "") as server:
        server.say("{}")
        assert await constraint_of(server, path, fields) == Constraint(kind="json_schema", text='{"type":"object"}')
