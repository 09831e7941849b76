"""The fields that say what an answer must look like, to the one constraint that the engine is asked for.

``constraint_of`` reads a request's own fields. A constraint from elsewhere (tools that must be called) is made as an
``Asked`` too, and given to ``generation_request``; docs/design/structured-output.md says what it may hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.messages import Constraint, ConstraintKind
from tokenspeed.server.errors import ApiError
from tokenspeed.server.requests import ResponseFormat, SamplingFields, StructuredOutputs


@dataclass(frozen=True)
class Asked:
    """A constraint, and the field that an error about it names."""

    constraint: Constraint
    field: str


_FIELDS: dict[str, ConstraintKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_INNER: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
CONSTRAINT_FIELDS = ("response_format", "structured_outputs", *_FIELDS)
"""Of which a request may give one."""


def constraint_of(body: SamplingFields) -> Asked | None:
    """Returns the constraint of a request, None where it asks for free text.

    Raises ApiError (400) where it asks for several, or for one that is empty.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        raise _invalid(f"{asked[0].field} and {asked[1].field} exclude each other; give one of them", asked[1].field)
    return asked[0] if asked else None


def of_response_format(form: ResponseFormat, field: str = "response_format") -> Asked | None:
    """Returns the constraint of one ``response_format``, None for plain text; raises ApiError (400)."""
    if (form.json_schema is not None) != (form.type == "json_schema"):
        raise _invalid(f"{field}.json_schema goes with type json_schema, and must be there", f"{field}.json_schema")
    if (form.triggers is not None or form.structures is not None) != (form.type == "structural_tag"):
        raise _invalid(f"{field}: triggers and structures go with type structural_tag, and must be there", field)
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Asked(Constraint(kind="json_object"), field)
    if form.json_schema is not None:
        return _of_value(f"{field}.json_schema.schema", "json_schema", form.json_schema.schema)
    return _of_value(field, "structural_tag", {"triggers": form.triggers, "structures": form.structures})


def _asked(body: SamplingFields) -> Iterator[Asked]:
    if body.response_format is not None:
        found = of_response_format(body.response_format)
        if found is not None:
            yield found
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs)
    for field, kind in _FIELDS.items():
        value = getattr(body, field)
        if value is not None:
            yield _of_value(field, kind, value)


def _of_structured_outputs(given: StructuredOutputs) -> Asked:
    field = "structured_outputs"
    asked = [
        _of_value(f"{field}.{name}", kind, value)
        for name, kind in _INNER.items()
        if (value := getattr(given, name)) is not None
    ]
    if given.json_object:
        asked.append(Asked(Constraint(kind="json_object"), f"{field}.json_object"))
    if len(asked) != 1:
        names = ", ".join((*_INNER, "json_object"))
        raise _invalid(f"{field} must hold one of {names}, and holds {len(asked) or 'none'}", field)
    return asked[0]


def _of_value(field: str, kind: ConstraintKind, value: Any) -> Asked:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if not text.strip():
        raise _invalid(f"{field} is empty", field)
    return Asked(Constraint(kind=kind, text=text), field)


def _invalid(message: str, field: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=field)
