"""What an operator orders, and the engine's answer."""

from typing import Literal

import msgspec

Action = Literal["pause", "continue", "flush_cache"]


class Order(msgspec.Struct, frozen=True, array_like=True):
    """An operator's order, answered under its ``number``.

    ``pause``: no more steps are planned; what is out lands, requests stay where they are and new ones wait.
    ``continue``: steps are planned again. Both may be repeated.
    ``flush_cache``: the prefix cache forgets everything, on the device and in host memory; refused while requests live.
    """

    number: int
    action: Action


class OrderDone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="order"):
    """The answer to the order of this number; ``refused`` says why it was not carried out, "" where it was."""

    version: int
    number: int
    refused: str = ""
