"""What is to be called: functions, their parameters, and the values that these may have."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenspeed.frontend.parsing.typed import as_json, converted, resolved, types_of

DEFINITIONS = ("$defs", "definitions", "x-guidance")
_MAX_VALUES = 512
_MAX_DEPTH = 4
_TAG_NAME = re.compile(r'[^\s<>"&/](?:[^<>"&\n\r\t]*[^\s<>"&])?')


class UnwritableCallError(ValueError):
    """A function that a format cannot write. ``function`` is its name, and the message says what of it."""

    def __init__(self, function: str, message: str) -> None:
        super().__init__(message)
        self.function = function


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        schema: with the definitions that it may refer to.
        types: the JSON types that it may have.
        values: all values that it may have, None where they are not listed.
    """

    name: str
    schema: Mapping[str, Any]
    required: bool

    @cached_property
    def types(self) -> frozenset[str]:
        return types_of(self.schema, self.schema)

    @cached_property
    def values(self) -> list[Any] | None:
        return listed_values(self.schema, self.schema)

    def texts(self) -> list[str] | None:
        """The listed values as text between tags, those that its reader would take for another value left out."""
        if self.values is None:
            return None
        texts = [(one if isinstance(one, str) else as_json(one), one) for one in self.values]
        return [text for text, value in texts if self.types == {"string"} or converted(text, self.types) == value]


@dataclass(frozen=True)
class Function:
    """A function that may be called; ``checked`` false: with any arguments."""

    name: str
    parameters: Mapping[str, Any] | None
    checked: bool = True

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        if not self.checked:
            return {"type": "object"}
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {**self.parameters, "type": "object"}

    @property
    def declared(self) -> list[Parameter]:
        """The parameters in their order; those of which only the name is known as required come last."""
        root = self.parameters or {}
        properties, required = root.get("properties") or {}, root.get("required") or []
        definitions = {key: root[key] for key in DEFINITIONS if key in root}
        names = dict.fromkeys((*properties, *required))
        return [
            Parameter(name, _with(properties.get(name, {}), definitions), self.checked and name in required)
            for name in names
        ]

    def writable(self, pattern: re.Pattern[str] = _TAG_NAME) -> list[Parameter]:
        """The parameters whose names can stand in a tag; raises UnwritableCallError for a required one that cannot."""
        found = []
        for one in self.declared:
            if pattern.fullmatch(one.name):
                found.append(one)
            elif one.required:
                raise UnwritableCallError(
                    self.name, f"the parameter {one.name!r} has a name that this model's calls cannot hold"
                )
        return found


@dataclass(frozen=True)
class Wanted:
    """What an answer may be.

    Attributes:
        functions: that may be called, at least one.
        must: the answer is calls and nothing else.
        parallel: it may have several.
        answer: the schema of an answer that is no call, None for free text.
        prompt_end: the end of the prompt, for formats that frame the whole answer.
    """

    functions: Sequence[Function]
    must: bool
    parallel: bool
    answer: Mapping[str, Any] | None = None
    prompt_end: str = ""


def _with(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with the definitions, if it refers to any: a grammar would hold them once for each parameter."""
    known = dict(schema) if isinstance(schema, Mapping) else {}
    refers = '"$ref"' in json.dumps(known)
    return {**{key: one for key, one in definitions.items() if refers or key == "x-guidance"}, **known}


def listed_values(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Any] | None:
    """The values that ``schema`` lists, through references and alternatives; None where it does not list them."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if "$ref" in schema:
        return listed_values(resolved(str(schema["$ref"]), root), root, depth + 1)
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"]) if len(schema["enum"]) <= _MAX_VALUES else None
    if schema.get("type") == "null":
        return [None]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            inner = [listed_values(one, root, depth + 1) for one in schema[key]]
            return None if any(one is None for one in inner) else [value for one in inner for value in one or ()]
    return None
