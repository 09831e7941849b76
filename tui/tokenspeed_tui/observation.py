"""What one look at a server brought, before anybody interprets it. It is also a line of a recording."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

RECORDING_VERSION = 1


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of one probe: ``status`` is the HTTP status, None where nothing answered."""

    status: int | None = None

    @property
    def passed(self) -> bool | None:
        """True, False, or None where nothing answered or the server has no such probe."""
        if self.status is None or self.status == 404:
            return None
        return 200 <= self.status < 300


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One look at a server.

    Attributes:
        version: RECORDING_VERSION of the writer.
        time: seconds since the epoch, by the observer's clock, when the answers were in.
        url: of the server, without a trailing slash.
        live, ready, progress: the three probes.
        state: the body of ``GET /v1/internal/state`` as it came; None where none came.
        error: why no state came; one line.
        configuration: the body of ``GET /v1/internal/configuration`` as it came, where it was asked for and is not
            what it was the last time; None where there is nothing new.
        configuration_error: why the server gave none when it was asked; one line.
        detail: the body of ``GET /v1/internal/requests/{id}`` of the request that is watched; None where none is.
        detail_error: why the server gave none; one line.
    """

    version: int
    time: float
    url: str
    live: Probe = Probe()
    ready: Probe = Probe()
    progress: Probe = Probe()
    state: dict[str, Any] | None = None
    error: str = ""
    configuration: dict[str, Any] | None = None
    configuration_error: str = ""
    detail: dict[str, Any] | None = None
    detail_error: str = ""


class Source(Protocol):
    """Where observations come from: a server, or a recording."""

    def observations(self) -> AsyncIterator[Observation]:
        """Yields an observation each time one is asked for; a recording ends, a server does not. Never raises for a
        server that is away: that is an observation with ``error``."""

    def watch_configuration(self, wanted: bool) -> None:
        """Whether the observations from now on bring the configuration too; a recording brings what it has."""

    def watch_request(self, request: str | None) -> None:
        """Whether the observations from now on bring the detail of this request (its id, or its handle in digits);
        a recording brings what it has."""
