"""Calls as Python writes them: ``[weather(city="Köln", days=2)]``."""

import json
import keyword
import re
from collections.abc import Mapping
from typing import Any

from tokenspeed.frontend.calling.functions import Function, UnwritableCallError, Wanted, listed_values
from tokenspeed.frontend.calling.lark import BOUNDS, NOTHING, NUMBER, Lark
from tokenspeed.frontend.calling.objects import not_begun_by
from tokenspeed.frontend.parsing.typed import resolved, types_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_START, _END = "<|python_start|>", "<|python_end|>"
_MAX_DEPTH = 6
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"/'
_INTEGER = "/-?(0|[1-9][0-9]{0,17})/"


def llama4_pythonic(lark: Lark, wanted: Wanted) -> str:
    """An answer that begins with a bracket is calls."""
    call = lark.any_of([_call(lark, function) for function in wanted.functions])
    several = f' (", " {call})*' if wanted.parallel else ""
    calls = lark.rule(f'"[" {call}{several} "]"')
    if wanted.must:
        return calls
    if wanted.answer is not None:
        return f"{lark.json(wanted.answer)} | {calls}"
    framed = f"{lark.written(_START)} {calls} {lark.written(_END)}"
    return f"{lark.rule(not_begun_by(lark, '[', _START))} | {calls} | {framed}"


def _call(lark: Lark, function: Function) -> str:
    """Arguments in the order of their declaration; the first that is there has no comma before it."""
    written = []
    for one in function.declared:
        if _NAME.fullmatch(one.name) and not keyword.iskeyword(one.name):
            content = _Values(lark, one.schema).value(one.schema if function.checked else {})
            written.append((lark.rule(f"{json.dumps(one.name + '=')} {content}"), one.required))
        elif one.required:
            raise UnwritableCallError(function.name, f"the parameter {one.name!r} has a name that Python cannot write")
    return f'{json.dumps(function.name + "(")} {separated(lark, written)} ")"'


def separated(lark: Lark, items: list[tuple[str, bool]]) -> str:
    """The items in their order with commas between; those that are not required (False) may be missing."""
    begun = empty = ""  # what may still come where an item came before, and where none did
    for name, required in reversed(items):
        with_it = f"{name} {begun}"
        behind = f'", " {with_it}'
        empty = lark.rule(with_it if required else f"{with_it} | {empty or NOTHING}")
        begun = lark.rule(behind if required else f"{behind} | {begun or NOTHING}")
    return empty or NOTHING


class _Values:
    """Python literals by a JSON schema: by types, listed values, bounds of numbers, items and properties."""

    def __init__(self, lark: Lark, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = root

    def value(self, schema: Any, depth: int = 0) -> str:
        """The expression of a value."""
        while isinstance(schema, Mapping) and "$ref" in schema and depth < _MAX_DEPTH:
            schema, depth = resolved(str(schema["$ref"]), self._root), depth + 1
        if not isinstance(schema, Mapping) or depth >= _MAX_DEPTH:
            schema = {}
        values = listed_values(schema, self._root)
        if values:
            return self._lark.any_of([json.dumps(repr_of(one), ensure_ascii=False) for one in values])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self._lark.any_of([self.value(one, depth + 1) for one in schema[key]])
        kinds = types_of(schema, self._root)
        return self._lark.any_of([self._of_type(kind, schema, depth) for kind in sorted(kinds)])

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        lark = self._lark
        match kind:
            case "string":
                return lark.terminal(_STRING)
            case "integer" | "number":
                bounds = {key: schema[key] for key in BOUNDS if key in schema}
                if bounds:
                    return lark.json({"type": kind, **bounds})
                return lark.terminal(_INTEGER if kind == "integer" else NUMBER)
            case "boolean":
                return lark.any_of(['"True"', '"False"'])
            case "null":
                return '"None"'
            case "array":
                return self._array(schema, depth)
        return self._object(schema, depth)

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._inner(schema.get("items"), depth)
        more = f'(", " {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._lark.rule(f'"[" {item} {more} "]"' + ("" if least else ' | "[]"'))

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            pair = f'{self._lark.terminal(_STRING)} ": " {self._inner(schema.get("additionalProperties"), depth)}'
            return self._lark.rule(f'"{{" ({pair} (", " {pair})*)? "}}"')
        required = schema.get("required") or ()
        items = [
            (self._lark.rule(f"{json.dumps(json.dumps(name) + ': ')} {self._inner(inner, depth)}"), name in required)
            for name, inner in properties.items()
        ]
        return self._lark.rule(f'"{{" {separated(self._lark, items)} "}}"')

    def _inner(self, schema: Any, depth: int) -> str:
        if isinstance(schema, Mapping) and depth < _MAX_DEPTH - 1:
            return self.value(schema, depth + 1)
        simple = [_STRING, NUMBER]
        return self._lark.any_of([*map(self._lark.terminal, simple), '"True"', '"False"', '"None"'])


def repr_of(value: Any) -> str:
    """A JSON value as Python writes it, with the quotes of JSON."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(repr_of, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {repr_of(one)}' for key, one in value.items())}}}"
    return repr(value)
