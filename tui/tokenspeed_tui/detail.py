"""One request in depth: the body of ``GET /v1/internal/requests/{id}``, read without trusting it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed_tui.view import RequestView, clean, items_of, lenient


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """A request came into a state, see TimelineEntry."""

    state: str | None = None
    time: float | None = None
    round: int | None = None


class DetailView(RequestView, frozen=True, kw_only=True):
    """Everything a server knows of one request, see RequestDetail."""

    time: float | None = None
    timeline: tuple[EntryView, ...] = ()
    timeline_omitted: int | None = None
    explain: tuple[str, ...] = ()
    ended: float | None = None
    finish_reason: str | None = None
    error: str | None = None


def read_detail(raw: Mapping[str, Any]) -> DetailView:
    """Reads the body of ``GET /v1/internal/requests/{id}``; never raises."""
    return msgspec.structs.replace(
        lenient(DetailView, raw),
        timeline=tuple(lenient(EntryView, item) for item in items_of(raw.get("timeline"))),
        explain=tuple(clean(item) for item in items_of(raw.get("explain")) if isinstance(item, str)),
    )
