"""Nothing is selected, tuned or compiled once serving has begun; what does so all the same is counted.

The engine says when serving begins (``begin_serving``). From then on the registry counts each selection, binding,
tuning and compilation, and logs the first of each kind for each operation. Tuning is refused, because it would take
the machine from those who are served. The others finish: a step that is late is better than one that fails. With
TOKENSPEED_KERNEL_GUARD=strict all of them are refused, which is what tests and benchmarks want.
"""

import logging
import os
import threading
from collections import Counter
from typing import Literal

GUARD_VARIABLE = "TOKENSPEED_KERNEL_GUARD"
STRICT = "strict"

Action = Literal["select", "bind", "tune", "compile", "capture"]
ALWAYS_REFUSED: frozenset[Action] = frozenset({"tune"})

logger = logging.getLogger("tokenspeed_kernel")


class ServingViolation(RuntimeError):
    """Something that belongs before serving was asked for while serving; the message says what, and of whom."""


class ServingGuard:
    """Whether this process serves, and what was done that should not have been. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serving = False
        self._counts: Counter[tuple[Action, str]] = Counter()

    @property
    def serving(self) -> bool:
        return self._serving

    def begin(self) -> None:
        """Serving begins; the counts start at nothing."""
        with self._lock:
            self._serving = True
            self._counts.clear()

    def end(self) -> None:
        """Serving has ended; the counts stay to be read."""
        self._serving = False

    def check(self, action: Action, subject: str) -> None:
        """Counts ``action`` on ``subject`` (an operation or a kernel) where the process serves.

        Raises ServingViolation where the action is refused.
        """
        if not self._serving:
            return
        with self._lock:
            self._counts[action, subject] += 1
            first = self._counts[action, subject] == 1
        message = f"{action} of {subject} while serving; do it before serving begins, in the build or the warm-up" + (
            " (or with `tokenspeed-kernel tune`)" if action == "tune" else ""
        )
        if first:
            logger.warning("%s", message)
        if action in ALWAYS_REFUSED or os.environ.get(GUARD_VARIABLE) == STRICT:
            raise ServingViolation(message)

    def violations(self) -> dict[str, int]:
        """ "action subject" to how often it was done while serving, such as {"bind gemm.linear": 2}."""
        with self._lock:
            return {f"{action} {subject}": count for (action, subject), count in sorted(self._counts.items())}


_guard = ServingGuard()


def process_guard() -> ServingGuard:
    """The process's guard."""
    return _guard


def begin_serving() -> None:
    """Tells the process's guard that serving begins: everything is bound, tuned, compiled and warm."""
    _guard.begin()


def note_compilation(kernel: str) -> None:
    """To be called by a kernel package each time it compiles something for ``kernel`` at run time.

    Raises ServingViolation while serving under the strict guard.
    """
    _guard.check("compile", kernel)
