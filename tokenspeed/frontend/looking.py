"""Looking at the engine: while somebody does, its snapshots are complete, and it answers questions about requests."""

import asyncio
import itertools
import time
from collections.abc import Callable

from tokenspeed.frontend.engine_state import EngineState
from tokenspeed.frontend.errors import EngineUnavailable
from tokenspeed.messages import Inspect, Inspected
from tokenspeed.messages.snapshot import RequestDetail

WATCH_S = 5.0
"""So long the engine is asked for complete snapshots at a time; asked again once half of it is over."""

FRESH_S = 1.0
"""A complete snapshot of this age is as good as a new one: an idle engine sends one a second."""

PATIENCE_S = 0.5
"""How long a reader waits for a complete snapshot: an engine in a long step answers after it, and the last is shown."""

ANSWER_S = 2.0
"""How long a question about a request waits for its answer."""


class Looking:
    """Says that somebody looks, and asks. Lives in one event loop.

    ``watch`` tells the engine for how many seconds, ``ask`` puts a question to it.
    """

    def __init__(self, state: EngineState, watch: Callable[[float], None], ask: Callable[[Inspect], None]) -> None:
        self._state = state
        self._watch = watch
        self._ask = ask
        self._watched_until = float("-inf")
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Inspected]] = {}

    async def look(self) -> None:
        """Returns once the last snapshot is complete and fresh, or after PATIENCE_S; at once without a ready engine."""
        if not self._state.ready:
            return
        now = time.monotonic()
        fresh = self._is_fresh()
        if not fresh or self._watched_until - now < WATCH_S / 2:
            self._watched_until = now + WATCH_S
            self._watch(WATCH_S)
        if fresh:
            return
        seen = self._state.snapshots
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self._state.ready and not (self._state.snapshots > seen and self._is_fresh()):
                    await self._state.changed()
        except TimeoutError:
            return

    def _is_fresh(self) -> bool:
        snapshot, age = self._state.snapshot, self._state.snapshot_age
        return snapshot is not None and snapshot.complete and age is not None and age <= FRESH_S

    async def inspect(self, name: str) -> RequestDetail | None:
        """Returns what is known of the request of this name, None where there is none.

        Raises EngineUnavailable where the engine ended meanwhile, TimeoutError where it did not answer in ANSWER_S.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Inspected] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self._ask(Inspect(number, name))
            return (await asyncio.wait_for(answer, ANSWER_S)).detail
        finally:
            self._open.pop(number, None)

    def answered(self, answer: Inspected) -> None:
        """The engine answered."""
        waiting = self._open.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def engine_gone(self, cause: str) -> None:
        """Nobody will answer, and the next engine does not know yet that somebody looks."""
        self._watched_until = float("-inf")
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(f"the engine ended: {cause}", "engine_unavailable"))
