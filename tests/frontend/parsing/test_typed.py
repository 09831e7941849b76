"""Arguments that are written as text: the types that declarations give them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import FAMILIES, declared, parse

from tokenspeed.frontend.parsing.parts import put_together
from tokenspeed.frontend.parsing.typed import Tools, converted, types_of

ALL = {"string", "number", "integer", "boolean", "null", "object", "array"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("2", {"string"}, "2"),
        ("null", {"string"}, "null"),
        (" a\n", {"string"}, " a\n"),
        ("2", {"integer"}, 2),
        (" 2 ", {"integer"}, 2),
        ("2.0", {"integer"}, 2),
        ("2.5", {"integer"}, "2.5"),
        ("2", {"number"}, 2),
        ("2.5", {"number"}, 2.5),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, "1e999"),
        ("true", {"boolean"}, True),
        ("True", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("None", {"null", "integer"}, None),
        ("null", {"null", "string"}, None),
        ("2", {"string", "integer"}, 2),
        ("two", {"string", "integer"}, "two"),
        ('"two"', {"string", "integer"}, '"two"'),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': True}", {"object"}, {"a": True}),
        ("{'a': 1e999}", {"object"}, "{'a': 1e999}"),
        ("{1, 2}", {"object"}, "{1, 2}"),
        ("[1, 2]", {"array"}, [1, 2]),
        ("[1, 2]", {"object"}, "[1, 2]"),
        ("[" * 5000, {"array"}, "[" * 5000),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("2", ALL, 2),
        ("text", ALL, "text"),
    ],
)
def test_a_text_becomes_what_is_declared(text: str, types: set[str], value: Any) -> None:
    found = converted(text, frozenset(types))
    assert found == value and type(found) is type(value)


def test_types_of_schemas() -> None:
    root = {"$defs": {"Count": {"type": "integer"}, "Self": {"$ref": "#/$defs/Self"}}}
    for schema, types in [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"$ref": "#/$defs/Count"}, {"enum": ["a", 1.5]}]}, {"integer", "string", "number"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, {"string"}),
        ({"enum": [1, 2]}, {"integer"}),
        ({"const": None}, {"null"}),
        ({"$ref": "#/$defs/Self"}, ALL),
        ({"$ref": "#/nowhere"}, ALL),
        ({"type": "word"}, ALL),
        ({}, ALL),
        ("bar", ALL),
        (True, ALL),
    ]:
        assert types_of(schema, root) == types, schema


def test_a_schema_that_holds_itself_many_times_costs_little() -> None:
    root: dict[str, Any] = {"anyOf": [{"$ref": "#"}] * 16}
    assert types_of(root, root) == ALL


@given(st.text(max_size=30))
def test_a_text_comes_back_as_it_was(text: str) -> None:
    """Where nothing in it is a marker; in pieces of one character."""
    if "<" in text or "]" in text:
        return
    for name, before, behind in [
        ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>", "</arg_value></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\n",
         "\n</parameter>\n</function>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="weather"><parameter name="city">',
         "</parameter></invoke></minimax:tool_call>"),
    ]:  # fmt: skip
        whole = before + text + behind
        family = FAMILIES[name].parsing(reasoning_format="")
        found = put_together(parse(family, whole, list(range(len(whole)))))
        assert [json.loads(call.arguments) for call in found.calls] == [{"city": text}], name


def test_what_the_model_says_itself_beats_the_declaration() -> None:
    tools = [declared("f", a={"type": "integer"}, b={"type": "string"})]
    text = (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="false">{"c": 1}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>'
    )
    found = put_together(parse(FAMILIES["deepseek_v4"].parsing(tools=tools, prompt_end=""), text))
    assert json.loads(found.calls[0].arguments) == {"a": "1", "b": {"c": 1}}


def test_a_name_that_was_not_declared_is_still_the_models_call() -> None:
    found = put_together(
        parse(FAMILIES["hermes"].parsing(), '<tool_call>{"name": "nope", "arguments": {}}</tool_call>')
    )
    assert [call.name for call in found.calls] == ["nope"]
    assert "weather" in Tools([declared("weather")]) and "nope" not in Tools([])


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('{"name": "time", "arguments": {"a": 1, }}', '{"a": 1, }', ""),
        ('{"name": "time", "arguments": {"a": [1}}', '{"a": [1}}', ""),
        ('{"name": "time", "arguments": "{\\"a\\": 1}"}', '{"a": 1}', ""),
        ('{"arguments": {"a": 1}, "name": "time"}', '{"a": 1}', ""),
        ('{"name": "time", "arguments": null}', "{}", ""),
        ('{"name": "time"}', "{}", ""),
        ('{"name": "time", "arguments": {"a": "b', '{"a": "b', ""),
        ('{"name": "time", "arguments": oops}', "oops", ""),
        ('{"name": "time", "arguments": {}}}', "{}", "}"),
        ('{"name": 3, "arguments": {}}', None, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("time()", None, "<tool_call>time()</tool_call>"),
        ("", None, "<tool_call></tool_call>"),
    ],
)
def test_broken_json_in_a_call(text: str, arguments: str | None, content: str) -> None:
    """A call with a name is a call, its arguments as they came; anything else is text, markers and all."""
    found = put_together(parse(FAMILIES["hermes"].parsing(), f"<tool_call>{text}</tool_call>"))
    assert [call.arguments for call in found.calls] == ([] if arguments is None else [arguments])
    assert found.content == content
