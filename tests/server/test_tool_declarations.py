"""What this version refuses of tools, by name and place, and the server lives."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from parsed_answers import TOOLS, declared
from tool_server import CALLS, CHAT, SMALL, Served

from tokenspeed.frontend.chat_template import ChatTemplate
from tokenspeed.server.tools import offered_tools


@pytest.fixture
async def hermes() -> AsyncIterator[Served]:
    async with Served("hermes", "qwen3", "enable_thinking") as served:
        yield served


async def test_tools_without_a_format_name_the_flag_and_the_key() -> None:
    """Known failure 24, last part."""
    async with Served() as served:
        error = await served.refused(CALLS)
        assert (error["param"], error["code"]) == ("tools", "no_tool_format")
        assert "--tool-format" in error["message"] and "formats.tools" in error["message"]
        assert (await served.post(CALLS, tool_choice="none"))["choices"][0]["message"]["content"] == "hello"


async def test_a_template_without_tools_is_told(hermes: Served) -> None:
    hermes.stack.llm._template = ChatTemplate("{{ messages }}", "", "")
    error = await hermes.refused(CALLS)
    assert error["code"] == "chat_template_error" and "--chat-template" in error["message"]


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


PROPERTIES = "tools[0].function.parameters.properties"


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [1]}, "tools[0]", "object"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0]", "type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        (tool(name="a b"), "tools[0].function.name", "letters"),
        (tool(name=""), "tools[0].function.name", "letters"),
        (tool(name="a" * 65), "tools[0].function.name", "64"),
        (tool(name=None), "tools[0].function.name", "None"),
        (tool(description=1), "tools[0].function.description", "text"),
        (tool(strict="yes"), "tools[0].function.strict", "true or false"),
        (tool(parameters={"type": "string"}), "tools[0].function.parameters", "an object"),
        (tool(parameters=[]), "tools[0].function.parameters", "an object"),
        (tool(parameters={"properties": {"foo": "bar"}}), "tools[0].function.parameters.properties.foo", "'bar'"),
        (tool(parameters={"properties": "foo"}), "tools[0].function.parameters.properties", "object"),
        (tool(parameters={"type": "object", "required": "a"}), "tools[0].function.parameters.required", "names"),
        (tool(parameters={"properties": {"a": {"type": "text"}}}), f"{PROPERTIES}.a.type", "text"),
        (tool(parameters={"properties": {"a": {"anyOf": [1]}}}), f"{PROPERTIES}.a.anyOf[0]", "1"),
        (tool(parameters={"properties": {"a": {"enum": []}}}), f"{PROPERTIES}.a.enum", "list"),
        (tool(parameters={"properties": {"a": {"items": [{}, "x"]}}}), f"{PROPERTIES}.a.items[1]", "'x'"),
        (tool(parameters={"properties": {"a": {"items": 3}}}), f"{PROPERTIES}.a.items", "3"),
        (tool(parameters=deep(40)), None, "schemas deep"),
        (tool(description="x" * 70_000), "tools[0]", "65536"),
        ({"tools": [declared(f"f{at}") for at in range(129)]}, "tools", "128"),
        ({"tools": [declared(f"f{at}", a={"description": "x" * 60_000}) for at in range(9)]}, "tools", "524288"),
        ({"tools": [declared("a"), declared("b"), declared("a")]}, "tools[2].function.name", "tools[0]"),
        ({"tools": SMALL, "tool_choice": "maybe"}, "tool_choice", "auto"),
        ({"tools": SMALL, "tool_choice": {"type": "function"}}, "tool_choice", "auto"),
        ({"tools": SMALL, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "weather"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no tools"),
    ],
)  # fmt: skip
async def test_wrong_declarations(hermes: Served, fields: dict[str, Any], param: str | None, says: str) -> None:
    """Known failure 25 and its kind: refused with the place, and the server lives."""
    error = await hermes.refused(CHAT, **fields)
    assert error["code"] == "invalid_value" and says in error["message"]
    assert param is None or error["param"] == param
    assert hermes.stack.engine.submits == []


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "unsupported_field"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "cache": 1}]}, "tools[0].cache", "unknown_field"),
        (tool(returns={}), "tools[0].function.returns", "unknown_field"),
    ],
)
async def test_what_this_server_does_not_know(hermes: Served, fields: dict[str, Any], param: str, code: str) -> None:
    error = await hermes.refused(CALLS, **fields)
    assert (error["param"], error["code"]) == (param, code)


def test_the_tools_of_the_parsers_tests_are_right() -> None:
    assert offered_tools(TOOLS, "auto", tool_format="hermes") == TOOLS


# -- /tokenize writes them as chat completions do ---------------------------------------------------------------------


async def tokenized(served: Served, **fields: Any) -> httpx.Response:
    return await served.client.post("/tokenize", json={"messages": CHAT["messages"], **fields})


async def test_a_conversation_with_tools_has_the_tokens_of_the_chat_request(hermes: Served) -> None:
    await hermes.post(CALLS)
    prompt = memoryview(hermes.stack.engine.submits[-1].prompt).cast("i").tolist()
    found = (await tokenized(hermes, tools=CALLS["tools"])).json()
    assert (found["tokens"], found["count"]) == (prompt, len(prompt))
    without = (await tokenized(hermes)).json()
    assert without["count"] < len(prompt) and (await tokenized(hermes, tools=[])).json() == without


async def test_tools_that_tokenize_refuses(hermes: Served) -> None:
    wrong = (await tokenized(hermes, tools=[1])).json()["error"]
    assert wrong["param"] == "tools[0]"
    beside = await hermes.client.post("/tokenize", json={"prompt": "x", "tools": CALLS["tools"]})
    assert beside.status_code == 400 and beside.json()["error"]["param"] == "tools"
    async with Served() as served:
        assert (await tokenized(served, tools=CALLS["tools"])).json()["error"]["code"] == "no_tool_format"
