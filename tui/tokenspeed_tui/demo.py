"""``--demo``: an engine without a server, as a source. Where there is a scheduler it is made; here it is looked at."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from tokenspeed_tui.observation import RECORDING_VERSION, Observation, Probe

WARM_S = 20.0
"""So much has happened before the first look: the first picture shows an engine at work."""

LONGEST_LEAP_S = 2.0
"""Where nobody looked for longer (the machine slept, the terminal was stopped), no more than this has passed."""

URL = "the demo: a scripted load on the real scheduler, no model"


class Simulation(Protocol):
    """An engine whose time passes when it is told to. One thread uses it at a time."""

    def advance(self, seconds: float) -> None:
        """Lets time pass."""

    def state(self) -> dict[str, Any]:
        """See Observation.state."""

    def configuration(self) -> dict[str, Any]:
        """See Observation.configuration."""

    def detail(self, request: str) -> dict[str, Any] | None:
        """See Observation.detail; None for a request that it does not know."""


class DemoSource:
    """A simulation as a source.

    Args:
        make: makes the simulation; called off the event loop, as it may import a lot.
        step: seconds from look to look; None: as many as passed on the clock.
        clock: monotonic seconds.
        url: what it is called on the screen.
    """

    def __init__(
        self,
        make: Callable[[], Simulation],
        *,
        step: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        url: str = URL,
    ) -> None:
        self._make = make
        self._step = step
        self._clock = clock
        self._url = url
        self._watched = False
        self._request: str | None = None

    def watch_configuration(self, wanted: bool) -> None:
        """The configuration comes with each look while it is wanted."""
        self._watched = wanted

    def watch_request(self, request: str | None) -> None:
        """The detail of this request comes with each look."""
        self._request = request

    async def observations(self) -> AsyncIterator[Observation]:
        """Looks each time an observation is asked for, for ever."""
        simulation = await asyncio.to_thread(self._make)
        seconds, looked = WARM_S, self._clock()
        while True:
            yield await asyncio.to_thread(self._look, simulation, seconds)
            now = self._clock()
            seconds = min(now - looked, LONGEST_LEAP_S) if self._step is None else self._step
            looked = now

    def _look(self, simulation: Simulation, seconds: float) -> Observation:
        simulation.advance(seconds)
        state = simulation.state()
        detail = simulation.detail(self._request) if self._request is not None else None
        good = Probe(status=200)
        return Observation(
            version=RECORDING_VERSION,
            time=float(state["snapshot"]["time"]),
            url=self._url,
            live=good,
            ready=good,
            progress=good,
            state=state,
            configuration=simulation.configuration() if self._watched else None,
            detail=detail,
            detail_error="the demo knows nothing of it any more" if self._request and detail is None else "",
        )
