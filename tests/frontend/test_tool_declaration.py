"""Tools as declarations of types."""

from typing import Any

import pytest

from tokenspeed.frontend.chat_template import ChatTemplate
from tokenspeed.frontend.tool_declaration import declare_tools


def tool(name: str, description: str = "", **parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function}


PLACES = tool(
    "places",
    "Finds places.\nOn land.",
    properties={
        "near": {"type": "object", "properties": {"x": {"type": "number", "minimum": 0}}, "required": ["x"]},
        "kinds": {"type": "array", "items": {"type": "string", "description": "one"}, "maxItems": 3},
        "area": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 5},
        "sort": {"enum": ["near", 1, None]},
        "name": {"type": "string", "description": "in any language", "maxLength": 9, "default": "你"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "any": {},
        "two": {"type": ["integer", "array"]},
        "open": {"type": "boolean", "default": True},
    },
    required=["near", "name"],
    additionalProperties=False,
)
DECLARED = """\
# Tools

## functions
namespace functions {
// Finds places.
// On land.
type places = (_: {
  // in any language
  // maxLength: 9
  // Default: "你"
  name: string,
  near: {
    // minimum: 0
    x: number
  },
  any?: any,
  // Default: 5
  area?: number | null,
  // maxItems: 3
  kinds?: Array<
    // one
    string
  >,
  // Default: True
  open?: boolean,
  sort?: "near" | 1 | None,
  tags?: Array<string>,
  two?: number | Array<any>,
  [k: string]: never
}) => any;
type now = (_: {}) => any;
}
"""


def test_every_kind_of_type() -> None:
    assert declare_tools([PLACES, tool("now"), {"type": "plugin"}]) == DECLARED


def test_types_that_are_named() -> None:
    node = {"type": "object", "description": "a leaf", "properties": {"up": {"$ref": "#"}}}
    text = declare_tools([tool("grow", properties={"leaf": {"$ref": "#/$defs/Leaf"}}, **{"$defs": {"Leaf": node}})])
    assert text.split("{\n", 1)[1] == (
        "interface parameters {\n  leaf?: Leaf\n}\n// a leaf\ninterface Leaf {\n  up?: parameters\n}\n"
        "type grow = (_: parameters) => any;\n}\n"
    )


@pytest.mark.parametrize(
    "tools", [[], [{"type": "plugin"}], [tool("x", properties={"a": {"$ref": "http://x"}})], [{"type": "function"}]]
)
def test_what_cannot_be_declared_is_left_to_json(tools: list[dict[str, Any]]) -> None:
    assert declare_tools(tools) == ""


def test_a_template_that_asks_for_declarations_gets_them() -> None:
    messages = [{"role": "user", "content": "x"}]
    asks = ChatTemplate("{{ tools_ts_str or tools | tojson }}", "", "")
    assert asks.render(messages, variables={"tools": [PLACES, tool("now")]}) == DECLARED
    odd = tool("x", properties={"b": {"$ref": "http://x"}, "a": {}})
    assert asks.render(messages, variables={"tools": [odd]}).index('"a"') < asks.render(
        messages, variables={"tools": [odd]}
    ).index('"b"'), "in JSON too, keys are in order"
    assert asks.render(messages, variables={"tools": [odd], "tools_ts_str": "mine"}) == "mine"
    other = ChatTemplate("{{ tools | tojson }}", "", "")
    assert other.render(messages, variables={"tools": [odd]}).index('"b"') > 0
