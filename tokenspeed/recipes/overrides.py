"""What the command line says, as a document that is laid over a recipe's keys: flags, and ``SET="key=value"``."""

from collections.abc import Mapping

from tokenspeed.recipes.document import Document, Place, RecipeError, Value, merge, parse_scalar
from tokenspeed.recipes.flags import FLAGS
from tokenspeed.recipes.resolved import GIB

OPEN_SECTIONS = ("kernels.", "env.")
"""Sections whose keys are free: everything after the first dot is one key (``kernels.gemm.linear``)."""


def flag_values(values: Mapping[str, object]) -> Document:
    """Turns flags, by parameter name (None: not given), into a document laid over the recipe's keys."""
    document = Document({})
    for flag in FLAGS:
        value = values.get(flag.parameter)
        if value is not None:
            assert isinstance(value, bool | int | float | str)
            scalar: Value = int(float(value) * GIB) if flag.kind == "gib" else value
            document = merge(document, _nested(flag.key, scalar, flag.name))
    return document


def set_values(assignments: list[str]) -> Document:
    """Reads ``key=value`` assignments, several separated by blanks too; raises RecipeError where one is none."""
    document = Document({})
    for assignment in (part for text in assignments for part in text.split()):
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise RecipeError(f"SET {assignment!r}: write key=value, for example scheduler.max_seqs=8")
        origin = f"SET {key}"
        # What goes to the environment or names a kernel is text, however much it looks like a number.
        value = text if key.startswith(OPEN_SECTIONS) else parse_scalar(text, origin)
        document = merge(document, _nested(key, value, origin))
    return document


def _nested(key: str, value: Value, origin: str) -> Document:
    path = tuple(key.split(".", 1)) if key.startswith(OPEN_SECTIONS) else tuple(key.split("."))
    data: Value = value
    for part in reversed(path):
        data = {part: data}
    assert isinstance(data, dict)
    place = Place(origin)
    return Document(data, {path[:length]: place for length in range(len(path) + 1)})
