"""The text of a constraint to a grammar in llguidance's own terms, checked before anything is compiled."""

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from tokenspeed.grammar.structural_tag import structural_tag_source
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import MAX_BEGIN_BYTES, MAX_CONSTRAINT_BYTES, Constraint, ConstraintError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # a name of the stubs only

MAX_DEPTH = 64
"""The most objects and arrays inside one another in a schema."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,64}"
"""Between the tokens of JSON: enough for any indentation, and an end for a model that would go on for ever."""

JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": WHITESPACE}
"""What a schema may overrule in its ``x-guidance``."""


def grammar_source(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Returns the grammar for llguidance; raises ConstraintError where the text is too long or makes no sense."""
    _check_size(constraint)
    text = constraint.text
    if constraint.kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)
    if constraint.kind == "json_schema":
        return _schema_source(text)
    if not text:
        raise ConstraintError(f"the {constraint.kind} is empty")
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if constraint.kind == "choice":
        return LLMatcher.grammar_from_regex(_choice_source(text))
    if constraint.kind == "structural_tag":
        return LLMatcher.grammar_from_lark(structural_tag_source(read_json(text), vocabulary, JSON_OPTIONS))
    return LLMatcher.grammar_from_lark(_lark(text))


def read_json(text: str) -> Any:
    """Returns the value of a JSON text; raises ConstraintError where it is none, or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ConstraintError(f"more than {MAX_DEPTH} objects and arrays lie inside one another") from error
    except ValueError as error:
        raise ConstraintError(f"not valid JSON: {error}") from error
    level = _containers([value])
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in _containers(item.values() if isinstance(item, dict) else item)]
    if level:
        raise ConstraintError(f"more than {MAX_DEPTH} objects and arrays lie inside one another")
    return value


def _containers(items: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [item for item in items if isinstance(item, dict | list)]


def _check_size(constraint: Constraint) -> None:
    for name, value, limit in (
        (constraint.kind, constraint.text, MAX_CONSTRAINT_BYTES),
        ("begin_after", constraint.begin_after, MAX_BEGIN_BYTES),
        ("opening", constraint.opening, MAX_BEGIN_BYTES),
    ):
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > limit:
            raise ConstraintError(f"the {name} has {size} bytes; at most {limit} are compiled")


def _schema_source(text: str) -> str:
    if not isinstance(read_json(text), dict):
        raise ConstraintError("the schema must be an object")
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    except ValueError as error:
        raise ConstraintError(str(error)) from error


def _choice_source(text: str) -> str:
    choices = read_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise ConstraintError("the choices must be a list of strings, at least one and none of them empty")
    return "|".join(re.escape(one) for one in dict.fromkeys(choices))


def _lark(text: str) -> str:
    try:
        lark: str = any_to_lark(text)
    except RecursionError as error:
        raise ConstraintError("the grammar is nested too deeply") from error
    except Exception as error:  # the converter raises what its parser happens to raise
        raise ConstraintError(f"the grammar cannot be read as EBNF: {error}") from error
    return lark
