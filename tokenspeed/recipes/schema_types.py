"""The types that a recipe's values have: strict sections, sizes with units, names, checksums."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*")
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def parse_size(value: object) -> object:
    """Turns "512 MiB" into bytes; leaves numbers and everything else to the schema.

    Raises ValueError for a text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(
            f"{value!r} is no size; write bytes (1073741824) or a size with a unit ({', '.join(_SIZE_UNITS)})"
        )
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def dimension_ranges(text: str) -> tuple[range, ...]:
    """ "32-1024" or "64, 128, 256" as ranges; ValueError for what is neither."""
    found = []
    for part in text.split(",") if text.strip() else []:
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(
                f"{part.strip()!r} is no number of dimensions; write 256, or 32-1024, or several with commas"
            )
        found.append(range(first, last + 1))
    return tuple(found)


def _dimensions(text: str) -> str:
    dimension_ranges(text)
    return text


def _hex(digits: int) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
            raise ValueError(f"expected {digits} hexadecimal digits")
        return value

    return AfterValidator(check)


def _relative(value: str) -> str:
    if value.startswith("/") or ".." in value.split("/"):
        raise ValueError("expected a path inside the package, without .. and without a leading /")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", value):
        raise ValueError("a name is lower-case letters, digits, dots, dashes and underscores (kimi-k2.5)")
    return value


Bytes = Annotated[
    int,
    BeforeValidator(parse_size, json_schema_input_type=int | Annotated[str, Field(pattern=_SIZE.pattern)]),
    Field(ge=0),
]
Name = Annotated[str, AfterValidator(_name)]
DimensionRanges = Annotated[str, AfterValidator(_dimensions)]
Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
RelativePath = Annotated[str, AfterValidator(_relative)]
Sha256 = Annotated[str, _hex(64)]
Revision = Annotated[str, _hex(40)]


class Strict(BaseModel):
    """Unknown keys are refused, text is never read as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
