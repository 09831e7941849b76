"""What a grammar of calls lets through, its family's parser reads as valid calls, and families' own answers pass it."""

import json
import random
from typing import Any

import jsonschema
import pytest
from call_walks import constraint_for, read, words
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import FAMILIES, TOOLS

from tokenspeed.frontend.calling.registry import CALL_GRAMMARS
from tokenspeed.frontend.parsing.registry import TOOL_FORMATS
from tokenspeed.messages import Constraint
from tokenspeed.server.constraints import Asked

EXACT = {"hermes", "qwen3", "kimi_k2", "deepseek_v3", "deepseek_v31", "llama3_json", "mistral", "gpt_oss", "inkling"}
"""Formats whose arguments are JSON: all that llguidance knows of a schema holds."""

EVERYWHERE: list[dict[str, Any]] = [
    {"type": "string"},
    {"enum": ["celsius", "</b>", "a b", 'q"\\']},
    {"$ref": "#/$defs/Kind"},
    {"type": "integer", "minimum": 0, "maximum": 12},
    {"type": "number"},
    {"type": "boolean"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"anyOf": [{"const": "none"}, {"type": "null"}]},
    {"enum": ["5", 5, None, True]},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    {
        "type": "object",
        "properties": {"k": {"enum": ["x", 1]}, "deep": {"type": "array", "items": {"$ref": "#/$defs/Kind"}}},
        "required": ["k"],
        "additionalProperties": False,
    },
]
IN_JSON: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^[a-z]{2}$"},
    {"type": "string", "minLength": 1, "maxLength": 3},
]


def test_every_format_has_a_grammar() -> None:
    assert set(CALL_GRAMMARS) == set(TOOL_FORMATS)


@st.composite
def declarations(draw: st.DrawFn, exact: bool) -> list[dict[str, Any]]:
    """One to three functions of up to four parameters."""
    tools = []
    kinds = st.sampled_from(EVERYWHERE + (IN_JSON if exact else []))
    for name in draw(st.lists(st.sampled_from(["weather", "get_time", "a-b"]), min_size=1, max_size=3, unique=True)):
        names = draw(st.lists(st.sampled_from(["city", "days", "p_1", "Ort"]), max_size=4, unique=True))
        properties = {one: draw(kinds) for one in names}
        required = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        parameters = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
            "$defs": {"Kind": {"enum": ["small", "large"]}},
            "x-guidance": {"whitespace_pattern": " ?"},
        }
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return tools


CHOICES = ("required", "named", "one")


@pytest.mark.parametrize("tool_format", sorted(set(TOOL_FORMATS) - {"qwen3"}))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_what_passes_is_read_as_valid_calls(tool_format: str, data: st.DataObject) -> None:
    tools = data.draw(declarations(tool_format in EXACT))
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    kind = data.draw(st.sampled_from(CHOICES))
    named = data.draw(st.sampled_from(sorted(schemas))) if kind == "named" else ""
    choice = {"type": "function", "function": {"name": named}} if named else "required"
    known = words(tool_format, data.draw(st.booleans()))
    parallel = kind != "one"
    constraint = constraint_for(known, tool_format, tools, choice, parallel)
    drawn = known.draw(constraint, random.Random(data.draw(st.integers(0, 1 << 30))), limit=500)
    answer = read(tool_format, tools, drawn)  # nothing is left out: what is beyond one call would show
    whole = answer.calls if drawn.ended else [call for call in answer.calls if call.complete]
    assert all(call.name in schemas for call in answer.calls)
    assert not named or {call.name for call in answer.calls} <= {named}
    for call in whole:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    if drawn.ended:
        assert answer.calls and all(call.complete for call in answer.calls), drawn
        assert answer.content.strip() == "", drawn
        assert parallel or len(answer.calls) == 1, drawn


STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_families_own_answers_pass(family: str, special: bool) -> None:
    """What a model was trained to write is what the grammar asks for, in free text and where calls must be made."""
    given_ = FAMILIES[family]
    known = words(given_.tools, special)
    whole = given_.tools == given_.reasoning
    texts = {"gpt_oss": (given_.one.removesuffix("<|call|>"),), "mistral": (given_.one,) if special else (given_.two,)}
    for text in texts.get(family, (given_.one, given_.two)):
        answer = text if whole else text.split("</think>")[-1].split("</mm:think>")[-1].split("[/THINK]")[-1]
        constraint = constraint_for(known, given_.tools, STRICT, "auto", prompt_end=given_.prompt_end)
        assert known.accepts(constraint, answer) == "", answer
        if "Let me see." in answer and not whole:
            calls = answer.split("Let me see.")[1]
            assert known.accepts(constraint_for(known, given_.tools, STRICT, "required"), calls) == ""
            assert known.accepts(constraint_for(known, given_.tools, STRICT, "required"), answer) != ""
            wrong = calls.replace("weather", "weathers")
            assert wrong != calls and known.accepts(constraint, "Let me see." + wrong) != ""
            if text == given_.two:
                assert known.accepts(constraint_for(known, given_.tools, STRICT, "auto", False), answer) != ""


@pytest.mark.parametrize("tool_format", sorted(set(TOOL_FORMATS) - {"qwen3"}))
def test_an_answer_in_json_beside_tools(tool_format: str) -> None:
    known = words(tool_format, True)
    schema = Asked(Constraint(kind="json_schema", text='{"enum": ["yes", 7]}'), "response_format")
    constraint = constraint_for(known, tool_format, TOOLS, "auto", answer=schema)
    frames = {
        "gpt_oss": ("<|channel|>final<|message|>", ""),
        "inkling": ("<|content_text|>", "<|end_message|>"),
        "kimi_k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    }
    before, behind = frames.get(tool_format, ("", ""))
    assert known.accepts(constraint, f'{before}"yes"{behind}') == "" == known.accepts(constraint, f"{before}7{behind}")
    assert known.accepts(constraint, f"{before}8{behind}") != ""
    seen = set()
    for seed in range(12):
        drawn = known.draw(constraint, random.Random(seed), limit=300)
        answer = read(tool_format, TOOLS, drawn)
        seen.add("calls" if answer.calls else answer.content)
    assert "calls" in seen
