"""The terminal dashboard: the scheduler's own state on one screen, read over HTTP from a running server.

The parts, in the order in which data passes through them: ``client`` (or ``recording``) brings an ``Observation``,
``view`` reads it without trusting it, ``picture`` folds it into an immutable ``Picture`` with rates, ``render`` turns
a picture into lines of text by pure functions, ``app`` and ``once`` put those lines on a screen or a pipe.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed_tui.local import Local


def main(argv: Sequence[str] | None = None, local: "Local | None" = None) -> int:
    """Runs the dashboard with the given command-line arguments (``sys.argv`` without them).

    ``local`` has what is on this machine beside the dashboard; without it there is no --demo, and nothing is found.

    Returns the exit status: 0, 1 where ``--once`` reached no server, 2 for arguments or files that cannot be used.
    """
    from tokenspeed_tui.command import run

    return run(argv, local)


__all__ = ["main"]
