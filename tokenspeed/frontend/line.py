"""The line in front of the engine: how many choices wait for their first token, and how fast they get it."""

import math
import time
from collections import deque
from collections.abc import Callable

from tokenspeed.frontend.errors import LineFull

WINDOW_S = 60.0
"""The rate at which choices begin is taken over so long, at most."""

UNKNOWN_S = 30
"""What is said where nothing has begun for so long that no rate is known."""

LONGEST_S = 300


class WaitingLine:
    """Counts the choices that were handed to the engine and have no token yet.

    Attributes:
        waiting: how many there are.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``most`` may wait, and a call that comes before there are so many goes in whole; 0 is no bound."""
        self.waiting = 0
        self._most = most
        self._clock = clock
        self._began: deque[float] = deque(maxlen=1024)

    def check(self) -> None:
        """Raises LineFull where too many wait; it estimates, by the rate of the last minute, when there is room."""
        if not self._most or self.waiting < self._most:
            return
        after = self._room_in()
        raise LineFull(
            f"{self.waiting} choices wait for their first token, and {self._most} may wait; try again in {after} s",
            after,
        )

    def joined(self, choices: int) -> None:
        self.waiting += choices

    def began(self) -> None:
        """One got its first token."""
        self.waiting -= 1
        self._began.append(self._clock())

    def left(self) -> None:
        """One ended before it had a token."""
        self.waiting -= 1

    def _room_in(self) -> int:
        """Seconds until so many have begun that the next may wait."""
        now = self._clock()
        while self._began and now - self._began[0] > WINDOW_S:
            self._began.popleft()
        if not self._began:
            return UNKNOWN_S
        a_second = len(self._began) / max(now - self._began[0], 1.0)
        return min(max(math.ceil((self.waiting - self._most + 1) / a_second), 1), LONGEST_S)
