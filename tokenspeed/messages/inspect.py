"""A question about one request, and the engine's answer."""

import msgspec

from tokenspeed.messages.snapshot import RequestDetail


class Inspect(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the request of this name? ``name`` is a request id or, in digits, a handle."""

    number: int
    name: str


class Inspected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="inspected"):
    """The answer to the question of this number; None where no such request lives or is among the last that ended."""

    version: int
    number: int
    detail: RequestDetail | None = None
