"""An operator's orders on their way to the engine and back."""

import asyncio
import itertools
from collections.abc import Callable

from tokenspeed.frontend.errors import EngineUnavailable
from tokenspeed.messages import Action, Order, OrderDone


class EngineOrders:
    """Numbers orders and waits for their answers. Lives in one event loop.

    Attributes:
        paused: the engine plans no steps, as far as it was told to and said so.
    """

    def __init__(self, send: Callable[[Order], None]) -> None:
        self.paused = False
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[OrderDone]] = {}

    async def give(self, action: Action) -> str:
        """Returns why the engine refused, "" where it did not; raises EngineUnavailable where it ended meanwhile."""
        number = next(self._numbers)
        answer: asyncio.Future[OrderDone] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self._send(Order(number, action))
            refused = (await answer).refused
        finally:
            self._open.pop(number, None)
        if action != "flush_cache":
            self.paused = action == "pause"
        return refused

    def done(self, answer: OrderDone) -> None:
        """The engine answered."""
        waiting = self._open.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def engine_gone(self, cause: str) -> None:
        """Nobody will answer; the next engine begins without a pause."""
        self.paused = False
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(f"the engine ended: {cause}", "engine_unavailable"))
