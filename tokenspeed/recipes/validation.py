"""Turns the schema's complaints into lines that name the file, the line, the key and the nearest right one."""

import difflib
import types
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tokenspeed.recipes.document import Document, KeyPath, RecipeError

_Model = TypeVar("_Model", bound=BaseModel)


def validate(model: type[_Model], document: Document) -> _Model:
    """Checks ``document`` against ``model``; raises RecipeError with one line a problem."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise RecipeError(*(_problem(model, document, detail) for detail in error.errors())) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean "x"?`` for the nearest of ``known``, else a list of what is known."""
    candidates = sorted(known)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(candidates)}" if candidates else ""


def _problem(model: type[BaseModel], document: Document, detail: ErrorDetails) -> str:
    path = _path_in(document, detail["loc"])
    where = ".".join(str(key) for key in path)
    place = document.place(path)
    kind = detail["type"]
    if kind == "extra_forbidden":
        parent = ".".join(str(key) for key in path[:-1])
        inside = f" in {parent}" if parent else ""
        hint = nearest(str(path[-1]), _fields_at(model, detail["loc"][:-1]))
        return f'{place}: unknown key "{path[-1]}"{inside}{hint}'
    if kind == "missing":
        missing = detail["loc"][-1]
        inside = f" in {where}" if where else ""
        return f'{place}: the key "{missing}" is missing{inside}'
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    given = detail["input"]
    shown = f" (it is {given!r})" if isinstance(given, bool | int | float | str) else ""
    return f"{place}: {where + ': ' if where else ''}{message}{shown}"


def _path_in(document: Document, loc: tuple[int | str, ...]) -> KeyPath:
    """The part of pydantic's location that exists in the document (it also names union members and missing keys)."""
    path: list[str | int] = []
    value: Any = document.data
    for key in loc:
        in_list = isinstance(value, list) and isinstance(key, int) and key < len(value)
        if in_list or (isinstance(value, dict) and key in value):
            path.append(key)
            value = value[key]
    return tuple(path)


def _fields_at(annotation: Any, loc: tuple[int | str, ...]) -> list[str]:
    """The keys that the schema knows at ``loc``."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _fields_at(arguments[0], loc)
    if origin in (Union, types.UnionType):
        models = [argument for argument in arguments if argument is not type(None)]
        tagged = [member for member in models if loc and _tag(member) == loc[0]]
        if tagged:
            return _fields_at(tagged[0], loc[1:])
        return [name for member in models for name in _fields_at(member, loc)]
    if origin in (dict, list):
        return _fields_at(arguments[-1], loc[1:]) if loc else []
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not loc:
            return list(annotation.model_fields)
        inner = annotation.model_fields.get(str(loc[0]))
        return _fields_at(inner.annotation, loc[1:]) if inner is not None else []
    return []


def _tag(member: Any) -> str | None:
    """The value of ``kind`` that selects this member of a tagged union."""
    field = getattr(member, "model_fields", {}).get("kind")
    values = get_args(field.annotation) if field is not None else ()
    return values[0] if values else None
