"""Lines for a person: progress that rewrites itself on a terminal and keeps quiet in a log."""

import shutil
import sys
import time
from collections import deque

from tokenspeed.recipes.byte_counts import human_bytes

_LOG_EVERY_S = 5.0
_SHORTEST_S = 0.5


def say(*lines: str) -> None:
    """Prints lines to standard output, at once."""
    for line in lines:
        print(line, flush=True)


def shout(*lines: str) -> None:
    """Prints warnings so that nobody misses them."""
    for line in lines:
        print(f"*** {line}", file=sys.stderr, flush=True)


class ProgressLine:
    """Shows "what  12.30 of 88.60 MiB, 4.10 MiB/s, 19 s left" on standard error.

    In place on a terminal, cut to its width; else a line every five seconds.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._what = ""
        self._last = 0.0
        self._rate = Rate()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Reports progress; matches recipes.weights.Progress."""
        now = time.monotonic()
        changed = _subject(what) != _subject(self._what)
        if changed:
            self._rate = Rate()
        self._rate.add(now, done)
        line = what
        if done or total:
            amount = f"{human_bytes(done)} of {human_bytes(total)}" if total else human_bytes(done)
            line = f"{what}  {amount}{self._rate.words(total - done)}"
        if self._terminal:
            if changed:
                self.finish()
            width = shutil.get_terminal_size().columns - 1
            if len(line) > width:  # the figures at the end matter most
                line = f"…{line[-width + 1 :]}"
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif what != self._what or now - self._last >= _LOG_EVERY_S or done == total > 0:
            print(line, file=sys.stderr, flush=True)
            self._last = now
        self._what = what

    def finish(self) -> None:
        """Ends the line that was rewritten in place."""
        if self._terminal and self._what:
            print(file=sys.stderr, flush=True)
        self._what = ""


def _subject(what: str) -> str:
    """What happens, without the remark in brackets that comes and goes ("download x (HTTP 503; again in 2 s)")."""
    return what.partition(" (")[0]


class Rate:
    """Bytes a second over the last moments, from samples of time and bytes done; what was there at first counts not."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, done: int) -> None:
        """Takes a sample. One that goes back (a file that comes anew) begins again."""
        if self._samples and done < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, done))
        while now - self._samples[0][0] > self._window_s and len(self._samples) > 2:
            self._samples.popleft()

    def words(self, left: int) -> str:
        """ ", 4.10 MiB/s, 19 s left"; "" while the rate is not known. ``left`` below 0: the total is not known."""
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        if last <= first or end - begin < _SHORTEST_S:
            return ""
        rate = (last - first) / (end - begin)
        remaining = f", {human_seconds(left / rate)} left" if left > 0 else ""
        return f", {human_bytes(int(rate))}/s{remaining}"


def human_seconds(seconds: float) -> str:
    """A duration for a person: "42 s", "3 min 20 s", "1 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
