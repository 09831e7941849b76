"""Lines for a person: progress that rewrites itself on a terminal and keeps quiet in a log."""

import sys
import time

from tokenspeed.recipes.plan import human_bytes

_LOG_EVERY_S = 5.0


def say(*lines: str) -> None:
    """Prints lines to standard output, at once."""
    for line in lines:
        print(line, flush=True)


def shout(*lines: str) -> None:
    """Prints warnings so that nobody misses them."""
    for line in lines:
        print(f"*** {line}", file=sys.stderr, flush=True)


class ProgressLine:
    """Shows "what  12.3 of 88.6 MiB" on standard error: in place on a terminal, else a line every five seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._what = ""
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Reports progress; matches recipes.weights.Progress."""
        now = time.monotonic()
        amount = f"{human_bytes(done)} of {human_bytes(total)}" if total else human_bytes(done)
        if self._terminal:
            if what != self._what:
                self.finish()
            print(f"\r{what}  {amount}\x1b[K", end="", file=sys.stderr, flush=True)
        elif what != self._what or now - self._last >= _LOG_EVERY_S or done == total > 0:
            print(f"{what}  {amount}", file=sys.stderr, flush=True)
            self._last = now
        self._what = what

    def finish(self) -> None:
        """Ends the line that was rewritten in place."""
        if self._terminal and self._what:
            print(file=sys.stderr, flush=True)
        self._what = ""
