"""What tools make of an answer: the constraint that reaches the engine, where it begins, and what cannot be asked."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from parsed_answers import declared
from tool_server import CALLS, CHAT, SMALL, Served

from tokenspeed.frontend.calling import registry
from tokenspeed.frontend.calling.functions import Function, Wanted
from tokenspeed.messages import MAX_CONSTRAINT_BYTES, Constraint
from tokenspeed.server import calls
from tokenspeed.server.calls import call_constraint
from tokenspeed.server.errors import ApiError

NAMED = {"type": "function", "function": {"name": "time"}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", 7]}}}


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**tool["function"], "strict": True}}


@pytest.fixture
async def hermes() -> AsyncIterator[Served]:
    async with Served("hermes", "qwen3", "enable_thinking") as served:
        yield served


async def constraint_of(served: Served, **fields: Any) -> Constraint | None:
    """What the engine is asked for."""
    await served.post(CHAT, **fields)
    return served.stack.engine.submits[-1].constraint


def expected(*functions: Function, must: bool = True, parallel: bool = True, answer: Any = None) -> str:
    wanted = Wanted(functions, must=must, parallel=parallel, answer=answer)
    return registry.call_grammar("hermes", wanted, {})


WEATHER = SMALL[0]["function"]["parameters"]
EMPTY = SMALL[1]["function"]["parameters"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": SMALL}, ""),
        ({"tools": SMALL, "parallel_tool_calls": False}, ""),
        ({"tools": [strict(one) for one in SMALL], "tool_choice": "none"}, ""),
        (
            {"tools": SMALL, "tool_choice": "required"},
            expected(Function("weather", WEATHER), Function("time", EMPTY)),
        ),
        ({"tools": SMALL, "tool_choice": NAMED}, expected(Function("time", EMPTY))),
        (
            {"tools": SMALL, "tool_choice": NAMED, "parallel_tool_calls": False},
            expected(Function("time", EMPTY), parallel=False),
        ),
        (
            {"tools": [strict(SMALL[0]), SMALL[1]]},
            expected(Function("weather", WEATHER), Function("time", EMPTY, checked=False), must=False),
        ),
        (
            {"tools": SMALL, "response_format": JSON},
            expected(
                Function("weather", WEATHER, checked=False),
                Function("time", EMPTY, checked=False),
                must=False,
                answer={"enum": ["yes", 7]},
            ),
        ),
    ],
)  # fmt: skip
async def test_tools_become_a_constraint(hermes: Served, fields: dict[str, Any], text: str) -> None:
    constraint = await constraint_of(hermes, **fields)
    opening = "<think>" if text else ""
    assert (constraint is None) == (text == "")
    assert constraint is None or constraint == Constraint(
        kind="grammar", text=text, begin_after="</think>", opening=opening
    )


@pytest.mark.parametrize(
    ("variables", "begins"),
    [
        ({}, ("</think>", "<think>")),
        ({"opened": "<think>\n"}, ("</think>", "")),
        ({"opened": "<think>\n\n</think>\n\n"}, ("", "")),
        ({"enable_thinking": False}, ("", "")),
        ({"enable_thinking": True}, ("</think>", "<think>")),
    ],
)
@pytest.mark.parametrize("asked", [{"response_format": JSON}, {"tools": SMALL, "tool_choice": "required"}])
async def test_it_begins_behind_the_reasoning(
    hermes: Served, variables: dict[str, Any], begins: tuple[str, str], asked: dict[str, Any]
) -> None:
    """Known failure 26 and its kind: reasoning is never cut off by a constraint, and never waited for in vain."""
    constraint = await constraint_of(hermes, **asked, chat_template_kwargs=variables)
    assert constraint is not None and (constraint.begin_after, constraint.opening) == begins
    going_on = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "So"}]}
    constraint = await constraint_of(hermes, **asked, **going_on, continue_final_message=True)
    assert constraint is not None and (constraint.begin_after, constraint.opening) == ("", "")


async def test_formats_that_frame_the_whole_answer() -> None:
    """Their grammars hold the reasoning; a constraint on the answer alone begins where the answer does."""
    async with Served("gpt_oss", "gpt_oss", "reasoning_effort") as served:
        constraint = await constraint_of(served, tools=SMALL, tool_choice="required")
        assert constraint is not None and constraint.begin_after == ""
        constraint = await constraint_of(served, response_format=JSON)
        assert constraint is not None and constraint.begin_after == "<|channel|>final<|message|>"
        opened = {"opened": "<|start|>assistant<|channel|>final<|message|>"}
        constraint = await constraint_of(served, response_format=JSON, chat_template_kwargs=opened)
        assert constraint is not None and constraint.begin_after == ""


async def test_without_a_reasoning_format_it_begins_at_once() -> None:
    async with Served("hermes") as served:
        constraint = await constraint_of(served, response_format=JSON)
        assert constraint is not None and constraint.begin_after == ""


async def test_other_constraints_beside_tools(hermes: Served) -> None:
    """What is no JSON cannot be joined with calls: beside free tools it is the whole answer."""
    constraint = await constraint_of(hermes, tools=SMALL, guided_regex="a+")
    assert constraint is not None and (constraint.kind, constraint.text) == ("regex", "a+")
    for fields in (
        {"tools": SMALL, "tool_choice": "required", "response_format": JSON},
        {"tools": [strict(SMALL[0])], "guided_regex": "a+"},
    ):
        error = await hermes.refused(CHAT, **fields)
        assert error["code"] == "invalid_value" and "exclude each other" in error["message"]


async def test_what_no_grammar_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = declared("f", **{'a"b': {"type": "string"}})
    wrong["function"]["parameters"]["required"] = ['a"b']
    async with Served("qwen3_coder") as served:
        error = await served.refused(CHAT, tools=[SMALL[0], wrong], tool_choice="required")
        assert error["param"] == "tools[1].function.parameters" and "'a\"b'" in error["message"]
        assert await constraint_of(served, tools=[SMALL[0], wrong]) is None
        monkeypatch.delitem(calls.CALL_GRAMMARS, "qwen3_coder")
        error = await served.refused(CHAT, tools=SMALL, tool_choice="required")
        assert error["param"] == "tool_choice" and "'qwen3_coder'" in error["message"]
        assert (await served.post(CALLS))["choices"]


async def test_the_model_is_shown_parameters_and_not_strict(hermes: Served) -> None:
    await hermes.post(CHAT, tools=[{"type": "function", "function": {"name": "now", "strict": True}}])
    shown = '<{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}>'
    assert hermes.prompt().startswith(shown)


def test_schemas_that_are_too_long_together() -> None:
    long = [declared(f"f{at}", a={"enum": [str(at) * (60 << 10)]}) for at in range(5)]
    with pytest.raises(ApiError, match=str(MAX_CONSTRAINT_BYTES)) as caught:
        call_constraint(long, "required", parallel=True, tool_format="hermes", special={})
    assert caught.value.body.error.param == "tool_choice"


def test_markers_are_the_tokens_of_the_tokenizer() -> None:
    asked = call_constraint(
        SMALL, "required", parallel=False, tool_format="kimi_k2", special={"<|tool_call_begin|>": 77}
    )
    assert asked is not None and asked.field == "tool_choice"
    assert '<[77]> "functions.weather:"' in asked.constraint.text
    assert '"<|tool_call_end|>"' in asked.constraint.text  # no special token here: text
