"""What a server runs with: the body of ``GET /v1/internal/configuration``, read without trusting it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed_tui.view import clean, count_of, items_of, lenient


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the configuration: its value as an operator writes it (None: not set), and what set it."""

    key: str | None = None
    value: str | None = None
    source: str | None = None


class ConfigurationView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /v1/internal/configuration``.

    Attributes:
        recipe_hash: of the recipe's content.
        started: when the server's process began, seconds since the epoch.
        keys: in the server's order.
        predicted, observed: term of the memory plan to bytes on the rank, as far as they are known.
    """

    model: str | None = None
    recipe: str | None = None
    profile: str | None = None
    recipe_hash: str | None = None
    started: float | None = None
    keys: tuple[KeyView, ...] = ()
    predicted: dict[str, int] = {}
    observed: dict[str, int] = {}


def read_configuration(raw: Mapping[str, Any]) -> ConfigurationView:
    """Reads the body of ``GET /v1/internal/configuration``; never raises."""
    memory = raw.get("memory")
    terms = memory if isinstance(memory, Mapping) else {}
    return msgspec.structs.replace(
        lenient(ConfigurationView, raw),
        keys=tuple(_key(item) for item in items_of(raw.get("keys")) if isinstance(item, Mapping)),
        predicted=_terms(terms.get("predicted")),
        observed=_terms(terms.get("observed")),
    )


def _key(raw: Mapping[str, Any]) -> KeyView:
    return msgspec.structs.replace(lenient(KeyView, raw), value=_written(raw.get("value")))


def _written(value: object) -> str | None:
    """A value as YAML has it, in one line; None where there is none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return clean(" ".join(value.split())) or None if isinstance(value, str) else None


def _terms(raw: object) -> dict[str, int]:
    items = raw.items() if isinstance(raw, Mapping) else ()
    return {clean(str(name)): size for name, size in items if count_of(size) is not None}
