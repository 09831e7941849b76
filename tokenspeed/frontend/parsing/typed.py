"""Arguments that a model writes as text between tags, made JSON by the types that the tool declares for them."""

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Sink, Steps

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 4
_MAX_ALTERNATIVES = 16


class Tools:
    """The declared functions: name to the JSON schema of its parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """``tools`` as OpenAI's requests have them: ``{"type": "function", "function": {"name", "parameters"}}``."""
        self._parameters = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def root(self, function: str) -> Mapping[str, Any]:
        """The schema of all parameters, which references start from."""
        return self._parameters.get(function, {})

    def schema(self, function: str, parameter: str) -> Any:
        """The schema of one parameter; {} where nothing is declared."""
        properties = self._parameters.get(function, {}).get("properties")
        return properties.get(parameter, {}) if isinstance(properties, Mapping) else {}

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """The JSON types that the parameter may have; all of them where nothing is declared."""
        return types_of(self.schema(function, parameter), self.root(function))


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that ``schema`` allows, through local references and alternatives, a few of each."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ALL
    if "$ref" in schema:
        return types_of(resolved(str(schema["$ref"]), root), root, depth + 1)
    if "type" in schema:
        kind = schema["type"]
        found = frozenset(str(one) for one in kind) if isinstance(kind, list) else frozenset({str(kind)})
        return (found | {"null"} if schema.get("nullable") is True else found) & _ALL or _ALL
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and len(schema[key]) <= _MAX_ALTERNATIVES:
            return frozenset[str]().union(*(types_of(one, root, depth + 1) for one in schema[key])) or _ALL
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) <= _MAX_ALTERNATIVES:
        return _ALL.intersection(*(types_of(one, root, depth + 1) for one in schema["allOf"])) or _ALL
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_type_of(value) for value in values) or _ALL


def resolved(where: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for key in where.removeprefix("#").strip("/").split("/") if where != "#" else ():
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def converted(text: str, types: frozenset[str]) -> Any:
    """Returns ``text`` as a value of one of ``types``; as a string where it is of none of them.

    Where text is allowed beside other types, what reads as one of those is one of those.
    """
    stripped = text.strip()
    value = _read(stripped)
    if value is not _NOTHING and _fits(value, types):
        return int(value) if isinstance(value, float) and "number" not in types else value
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if "null" in types and stripped in ("None", "null"):
        return None
    if types & {"object", "array"} and stripped[:1] in ("{", "["):
        value = _literal(stripped)
        if value is not _NOTHING and _fits(value, types):
            return value
    return text


_NOTHING = object()


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    if kind == "string":
        return False  # a text stands without quotes; quotes around it are its own
    whole = isinstance(value, float) and value.is_integer()
    return kind in types or (kind == "integer" and "number" in types) or (whole and "integer" in types)


def _read(text: str) -> Any:
    """``text`` as JSON; _NOTHING where it is none."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        _refuse(digits)
    return value


def _literal(text: str) -> Any:
    """``text`` as Python writes objects and lists, which models slip into; _NOTHING where it is none, or not JSON's."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _NOTHING
    return value


def as_json(value: Any) -> str:
    """``value`` as JSON text, in the manner of all arguments here."""
    return json.dumps(value, ensure_ascii=False)


class TypedArguments:
    """Writes the arguments of one call: ``open``, ``push`` the text of a value and ``close``, for each; then ``end``.

    A text is written while it comes; what may be another type is written once it is whole.
    """

    def __init__(self, out: Out, tools: Tools, function: str) -> None:
        self._out = out
        self._tools = tools
        self._function = function
        self._count = 0
        self._types = _ALL
        self._value: list[str] = []

    def open(self, parameter: str, types: frozenset[str] | None = None) -> None:
        """Begins a parameter; ``types`` where the model says them itself."""
        self._types = self._tools.types(self._function, parameter) if types is None else types
        self._value = []
        before, quote = ", " if self._count else "{", '"' if self.streams else ""
        self._out.arguments(f"{before}{as_json(parameter)}: {quote}")
        self._count += 1

    def push(self, text: str) -> None:
        """A piece of the value."""
        if self.streams:
            self._out.arguments(as_json(text)[1:-1])
        else:
            self._value.append(text)

    def close(self) -> None:
        """The value is whole."""
        self._out.arguments('"' if self.streams else as_json(converted("".join(self._value), self._types)))
        self._value = []

    def cut(self) -> None:
        """The answer ended in the middle of the value: what came of it is written as it is."""
        self._out.arguments("".join(self._value))

    def end(self) -> None:
        """The call is whole."""
        if self._count:
            self._out.arguments("}")
        self._out.end()

    @property
    def may_be_text(self) -> bool:
        return "string" in self._types

    @property
    def streams(self) -> bool:
        """Whether the value is a text, which is written while it comes."""
        return self._types == {"string"}


def value_through(
    reader: Reader, out: Out, arguments: TypedArguments, ends: tuple[str, ...], sink: Sink | None = None
) -> Steps[str]:
    """Takes a value through one of ``ends``, which it returns; "" where the answer ended before.

    ``sink`` takes it, for ``arguments`` in the end. In valid calls an object or a list may hold an end in a text.
    """
    if out.valid_calls and not arguments.may_be_text:
        yield from reader.space()
        if (yield from reader.peek()) in ("{", "["):
            yield from reader.json_value(arguments.push)
    return (yield from reader.through(ends, sink or arguments.push))


TEXT = frozenset({"string"})
NOT_TEXT = _ALL - TEXT
