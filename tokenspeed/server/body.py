"""Reads a request body: size, content type, JSON, fields, values; each failure is an ApiError of its own."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from tokenspeed.server.errors import TIMEOUT, ApiError
from tokenspeed.server.fields import COMPLETION_RULES, FieldRules, check_fields

_Body = TypeVar("_Body", bound=msgspec.Struct)

DISCARD_FACTOR = 8
"""A body beyond the limit is read on, and thrown away, up to so many times the limit, because a client that is cut off
while it is writing does not see the answer."""

BODY_S = 60.0
"""A body must be complete so long after its route began to read it."""

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_json(
    request: Request,
    kind: type[_Body],
    limit: int,
    *,
    optional: bool = False,
    rules: FieldRules = COMPLETION_RULES,
) -> tuple[_Body, list[str]]:
    """Returns the body as ``kind``, and the names of its fields that are accepted without effect.

    Args:
        request: with its body unread.
        kind: a struct whose fields are the supported ones.
        limit: the most bytes of a body.
        optional: an empty body stands for an object without fields.
        rules: what becomes of other fields.

    Raises:
        ApiError: 413, 415 or 400, naming the field where there is one.
        ClientGone: nobody is left to answer.
    """
    _check_content_type(request)
    data = await _read(request, limit) or (b"{}" if optional else b"")
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        ignored = check_fields(raw, kind.__struct_fields__, rules)
        return msgspec.json.decode(data, type=kind), ignored
    except msgspec.ValidationError as error:
        raise invalid_value(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(
            415,
            f"the content type is {content_type or 'empty'}; send JSON with the header Content-Type: application/json",
            code="unsupported_media_type",
        )


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    expected = int(declared) if declared.isdigit() else 0
    try:
        async with asyncio.timeout(BODY_S):
            pieces, size = await _pieces(request, limit, expected)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"the body was not complete {BODY_S:g} s after its request began",
            code="request_timeout",
            kind=TIMEOUT,
            headers={"Connection": "close"},
        ) from error
    if max(size, expected) > limit:
        raise ApiError(
            413,
            f"the body has {max(size, expected)} bytes; at most {limit} are read",
            code="request_too_large",
            headers={"Connection": "close"},
        )
    return b"".join(pieces)


async def _pieces(request: Request, limit: int, expected: int) -> tuple[list[bytes], int]:
    """Returns the body as far as it is kept, and its size as far as it was read."""
    pieces: list[bytes] = []
    size = 0
    while expected <= DISCARD_FACTOR * limit:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size <= limit:
            pieces.append(piece)
        if not message.get("more_body", False) or size > DISCARD_FACTOR * limit:
            break
    return pieces, size


def invalid_value(text: str, under: str = "") -> ApiError:
    """The error for a value of a wrong type or outside its range, in msgspec's words; ``under`` is where it stood."""
    matched = _PATH.match(text)
    what, path = (matched["what"], matched["path"] or "") if matched else (text, "")
    param = f"{under}{path}".lstrip(".")
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        # only parts of a body forbid unknown fields in the schema; the body's own went through check_fields
        inner = f"{param}.{unknown['name']}"
        return ApiError(400, f"{inner} is not a field of this request", code="unknown_field", param=inner)
    missing = re.match(r"Object missing required field `([^`]*)`", what)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(400, f"{param} is missing", code="missing_field", param=param)
    where = param or "the body"
    return ApiError(400, f"{where}: {what[0].lower()}{what[1:]}", code="invalid_value", param=param or None)
