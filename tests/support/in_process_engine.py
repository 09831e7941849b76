"""A whole engine, both planes, in the test's process: no sockets, no HTTP, everything else real."""

from collections.abc import Sequence
from dataclasses import dataclass

from memory_channel import MemoryChannel

from tokenspeed.launch.compose import compose_engine
from tokenspeed.messages import Submit
from tokenspeed.messages.snapshot import CounterSnapshot
from tokenspeed.recipes.resolved import ResolvedConfig


@dataclass(frozen=True)
class Run:
    """What came of a run: tokens by handle, and what the scheduler counted at its end."""

    tokens: dict[int, list[int]]
    channel: MemoryChannel
    counters: CounterSnapshot
    held: int

    def cached(self, handle: int) -> int:
        """Prompt tokens of the request that came from a cache, as its first output said."""
        return next(output.cached_tokens for output in self.channel.outputs if output.handle == handle)


def run_requests(config: ResolvedConfig, requests: Sequence[Submit], gaps: Sequence[int] = ()) -> Run:
    """Submits the requests in order, each ``gaps[i]`` rounds before the next one, and runs until all ended."""
    channel = MemoryChannel()
    engine = compose_engine(config, channel, lambda phase, done=0, total=0, detail="": None)
    try:
        for index, request in enumerate(requests):
            channel.send_in(submits=[request])
            for _ in range(gaps[index] if index < len(gaps) else 0):
                engine.loop.round()
        channel.send_in(drain=True)
        engine.loop.run()
        engine.loop.publish_snapshot()
    finally:
        engine.shutdown()
    for request in requests:
        assert channel.ends(request.handle) in (["length"], ["stop"]), channel.last(request.handle)
    last = channel.snapshots[-1]
    return Run(
        tokens={request.handle: channel.tokens(request.handle) for request in requests},
        channel=channel,
        counters=last.counters,
        held=sum(group.held for group in last.groups),
    )
