"""Whether a JSON schema that a client sends is one: what is checked here cannot surprise what reads it later."""

from typing import Any

MAX_DEPTH = 32
"""Schemas in schemas; deeper ones are refused."""

_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def schema_problem(schema: Any, where: str) -> tuple[str, str] | None:
    """Returns place and trouble of the first thing in ``schema`` that is no JSON schema; None where all is well.

    ``where`` names the schema, for the place.
    """
    waiting = [(schema, where, 0)]
    while waiting:
        part, place, depth = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            return place, f"must be a schema (an object), it is {_shown(part)}"
        if depth > MAX_DEPTH:
            return place, f"is more than {MAX_DEPTH} schemas deep"
        problem = _keyword_problem(part, place)
        if problem is not None:
            return problem
        ones = {key: part[key] for key in _ONES if part.get(key) is not None}
        if isinstance(ones.get("items"), list):  # how older drafts describe the first items
            waiting += [(one, f"{place}.items[{at}]", depth + 1) for at, one in enumerate(ones.pop("items"))]
        waiting += [(inner, f"{place}.{key}", depth + 1) for key, inner in ones.items()]
        for key in _MAPS:
            waiting += [(inner, f"{place}.{key}.{name}", depth + 1) for name, inner in part.get(key, {}).items()]
        for key in _LISTS:
            waiting += [(inner, f"{place}.{key}[{at}]", depth + 1) for at, inner in enumerate(part.get(key, ()))]
    return None


def _keyword_problem(schema: dict[str, Any], where: str) -> tuple[str, str] | None:
    """What is wrong with the keywords of one schema, those inside left aside."""
    kind = schema.get("type")
    if kind is not None and not all(one in _TYPES for one in (kind if isinstance(kind, list) else [kind])):
        return f"{where}.type", f"must be one or some of {', '.join(_TYPES)}, it is {_shown(kind)}"
    for key in _MAPS:
        if not isinstance(schema.get(key, {}), dict):
            return f"{where}.{key}", f"must be an object, it is {_shown(schema[key])}"
    for key in (*_LISTS, "enum"):
        if key in schema and (not isinstance(schema[key], list) or not schema[key]):
            return f"{where}.{key}", f"must be a list with something in it, it is {_shown(schema[key])}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{where}.required", f"must be a list of names, it is {_shown(required)}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
