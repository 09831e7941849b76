"""What only this machine has: an engine's packages, and servers that can be found.

The dashboard itself speaks HTTP and imports no engine: it gets a ``Local`` from whoever starts it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tokenspeed_tui.demo import Simulation


class Found(NamedTuple):
    """A server that was found here: its address, the name it serves, and where it runs, for a person."""

    url: str
    name: str
    where: str


class Local(Protocol):
    """Methods raise an error for the operator, RuntimeError or ValueError, where they cannot."""

    @property
    def command(self) -> tuple[str, ...]:
        """What starts the dashboard in another process, its options not included."""

    def demo(self, seed: int) -> Callable[[], Simulation]:
        """What makes the engine of --demo; what keeps it from working is said at once."""

    def servers(self) -> list[Found]:
        """The servers that this user started on this machine and that run now: at once."""

    def find(self) -> list[Found]:
        """These, and whatever else can be found here: it may take seconds."""
