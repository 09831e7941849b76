"""Where the cached parts of prompts came from: device, host memory or storage. Only a server of ours tells."""

import asyncio
from dataclasses import dataclass

from tokenspeed.cli.bench.wire import Wire, WireError

_PREFIX = "tokenspeed_engine_"
_COUNTERS = ("prefix_query_tokens", "prefix_hit_tokens", "host_hit_tokens", "storage_hit_tokens", "finished")
_READS = 100
_BETWEEN_S = 0.02

Counters = dict[str, int]


@dataclass(frozen=True)
class Tiers:
    """Prompt tokens that were looked up meanwhile, and those that were found, each in one place."""

    looked_up: int
    device: int
    host: int
    storage: int

    @classmethod
    def between(cls, before: Counters | None, after: Counters | None) -> "Tiers | None":
        """From the counters before and after; None where one is missing, or the engine was started again."""
        if before is None or after is None or any(after[name] < before[name] for name in _COUNTERS):
            return None
        looked_up, hits, host, storage, _ = (after[name] - before[name] for name in _COUNTERS)
        return cls(looked_up, hits - host - storage, host, storage)


async def read_counters(wire: Wire, finished: int = 0) -> Counters | None:
    """The engine's totals; None for a server that has none.

    The engine tells its totals a moment after the last answer: they are read again until ``finished`` requests have
    ended, or given up after two seconds.
    """
    for _ in range(_READS):
        try:
            status, body = await wire.fetch("GET", "/metrics")
        except WireError:
            return None
        counters = parse_counters(body.decode(errors="replace")) if status == 200 else None
        if counters is None or counters["finished"] >= finished:
            return counters
        await asyncio.sleep(_BETWEEN_S)
    return None


def parse_counters(text: str) -> Counters | None:
    """The totals out of the metrics; None where one is missing."""
    found: Counters = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        short = name.removeprefix(_PREFIX).removesuffix("_total")
        if name == f"{_PREFIX}{short}_total" and short in _COUNTERS:
            found[short] = int(float(value))
    return found if len(found) == len(_COUNTERS) else None
