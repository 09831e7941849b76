"""How much each key may ask: requests a minute, and requests at a time."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.telemetry.api_keys import ApiKey


class TokenBucket:
    """Holds up to ``per_minute`` requests and fills evenly. Times are seconds of the caller's clock."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, now: float) -> float:
        """Takes one request and returns 0, or returns the seconds until one is there."""
        self._fill(now)
        if self._level >= 1.0:
            self._level -= 1.0
            return 0.0
        return (1.0 - self._level) * 60.0 / self.per_minute

    def remaining(self, now: float) -> int:
        self._fill(now)
        return int(self._level)

    def full_in(self, now: float) -> float:
        """Seconds until it holds all of them again."""
        self._fill(now)
        return (self.per_minute - self._level) * 60.0 / self.per_minute

    def _fill(self, now: float) -> None:
        self._level = min(self._level + max(now - self._at, 0.0) * self.per_minute / 60.0, float(self.per_minute))
        self._at = now


@dataclass(frozen=True)
class OverLimit:
    """Why a request is refused, and after how many seconds it may come again; ``knob`` is what an operator can turn."""

    reason: str
    message: str
    retry_after_s: int
    knob: str


class Allowances:
    """What every key has left. Keys are told apart by their names; the requests of a server without keys share one.

    Args:
        per_minute, concurrent: of a key that says nothing else; 0 is no bound.
        clock: seconds, never going back.
    """

    def __init__(self, per_minute: int, concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._concurrent = concurrent
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._open: dict[str, int] = {}

    def enter(self, key: ApiKey) -> OverLimit | None:
        """Counts a request in and returns None (then ``leave`` must follow), or says why not."""
        now = self._clock()
        most = self._concurrent if key.concurrent is None else key.concurrent
        running = self._open.get(key.name, 0)
        if most and running >= most:
            text = f"the key {key.name!r} has {running} requests open, and {most} are allowed at a time"
            return OverLimit("concurrency_limit_exceeded", text, 1, _knob("api.max_concurrent", "concurrent"))
        bucket = self._bucket(key, now)
        if bucket is not None and (wait := bucket.take(now)) > 0:
            text = f"the key {key.name!r} has used up its {bucket.per_minute} requests a minute"
            return OverLimit("rate_limit_exceeded", text, math.ceil(wait), _knob("api.requests_per_minute", "rpm"))
        self._open[key.name] = running + 1
        return None

    def leave(self, key: ApiKey) -> None:
        """Counts a request out."""
        self._open[key.name] -= 1
        if not self._open[key.name]:
            del self._open[key.name]

    def headers(self, key: ApiKey) -> dict[str, str]:
        """What an answer says of the bound: OpenAI's names; nothing where there is none."""
        now = self._clock()
        bucket = self._bucket(key, now)
        if bucket is None:
            return {}
        return {
            "x-ratelimit-limit-requests": str(bucket.per_minute),
            "x-ratelimit-remaining-requests": str(bucket.remaining(now)),
            "x-ratelimit-reset-requests": f"{bucket.full_in(now):.3f}s",
        }

    def _bucket(self, key: ApiKey, now: float) -> TokenBucket | None:
        per_minute = self._per_minute if key.rpm is None else key.rpm
        if not per_minute:
            self._buckets.pop(key.name, None)
            return None
        bucket = self._buckets.get(key.name)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[key.name] = TokenBucket(per_minute, now)
        return bucket


def _knob(setting: str, bound: str) -> str:
    return f"{setting}, or {bound}=N behind the key in the key file"
