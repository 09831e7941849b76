"""Tools as declarations of types, which is how Kimi K2.5 and K2.6 were taught them.

Their tokenizer's code hands the text to the template as ``tools_ts_str``; a template that asks for it gets it here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

NAME = "tools_ts_str"
"""The variable of the template."""

_STEP = "  "
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_OF_A_UNION = {"integer": "number", "object": "{}", "array": "Array<any>"}


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the declarations of all functions; "" where there are none, or where a schema cannot be said so (the
    template then falls back to JSON)."""
    try:
        functions = [_function(tool["function"]) for tool in tools if tool.get("type") == "function"]
    except (KeyError, TypeError, AttributeError, ValueError):
        return ""
    if not functions:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def sorted_deep(value: Any) -> Any:
    """``value`` with the keys of every mapping in order."""
    if isinstance(value, Mapping):
        return {key: sorted_deep(item) for key, item in sorted(value.items())}
    return [sorted_deep(item) for item in value] if isinstance(value, list) else value


def _function(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    own = "parameters" if _mentions_itself(parameters) else ""
    lines = []
    if own:
        fields = ",\n".join(_field(name, one, parameters, _STEP) for name, one in parameters["properties"].items())
        lines.append(f"interface {own} {{\n{fields}\n}}")
    for name, schema in (parameters.get("$defs") or {}).items():
        lines += [*_comment(schema.get("description"), ""), f"interface {name} {_type(schema, '')}"]
    lines += _comment(function.get("description"), "")
    lines.append(f"type {function['name']} = (_: {own or _object(parameters, '')}) => any;")
    return "\n".join(lines)


def _mentions_itself(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return schema.get("$ref") == "#" or any(_mentions_itself(item) for item in schema.values())
    return isinstance(schema, list) and any(_mentions_itself(item) for item in schema)


def _type(schema: Any, indent: str) -> str:
    if schema is True or schema == {}:
        return "any"
    if schema is False:
        return "null"
    if "$ref" in schema:
        return _reference(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(one, indent) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join(_OF_A_UNION.get(str(one), str(one)) for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema, indent)
    return "number" if kind == "integer" else str(kind)


def _reference(where: str) -> str:
    if where == "#":
        return "parameters"
    if not where.startswith("#/$defs/"):
        raise ValueError(f"{where!r} leads out of the schema")
    return where.rsplit("/", 1)[-1]


def _object(schema: Mapping[str, Any], indent: str) -> str:
    """Required fields first, both kinds by name."""
    inner, required = indent + _STEP, schema.get("required") or []
    properties = sorted((schema.get("properties") or {}).items(), key=lambda item: (item[0] not in required, item[0]))
    fields = [_field(name, one, schema, inner) for name, one in properties]
    others = schema.get("additionalProperties")
    if others is not None:
        fields.append(f"{inner}[k: string]: {'never' if others is False else _type(others, inner)}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _field(name: str, schema: Any, parent: Mapping[str, Any], indent: str) -> str:
    lines = _notes(schema, indent)
    default = schema.get("default") if isinstance(schema, Mapping) else None
    if default is not None:
        plain = isinstance(default, int | float)
        lines.append(f"{indent}// Default: {default if plain else json.dumps(default, ensure_ascii=False)}")
    mark = "" if name in (parent.get("required") or []) else "?"
    return "\n".join([*lines, f"{indent}{name}{mark}: {_type(schema, indent)}"])


def _array(schema: Mapping[str, Any], indent: str) -> str:
    item = schema.get("items") or {}
    inner = indent + _STEP
    notes = _notes(item, inner)
    if not notes:
        return f"Array<{_type(item, indent)}>"
    return "\n".join(["Array<", *notes, f"{inner}{_type(item, inner)}", f"{indent}>"])


def _notes(schema: Any, indent: str) -> list[str]:
    """Description and limits, as comments."""
    if not isinstance(schema, Mapping):
        return []
    kind = schema.get("type")
    plain = isinstance(kind, str) and not {"$ref", "anyOf", "enum"} & schema.keys()
    limits = [f"{key}: {schema[key]}" for key in _LIMITS.get(str(kind), ()) if plain and key in schema]
    return [*_comment(schema.get("description"), indent), *([f"{indent}// {', '.join(limits)}"] if limits else [])]


def _comment(text: str | None, indent: str) -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []
