"""A whole engine, both planes, in the test's process: no sockets, no HTTP, everything else real."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from memory_channel import MemoryChannel

from tokenspeed.engine.loop import EventLoop
from tokenspeed.launch.compose import compose_engine
from tokenspeed.messages import Submit
from tokenspeed.messages.snapshot import CounterSnapshot
from tokenspeed.recipes.resolved import KVConfig, ModelSource, ResolvedConfig, SchedulerSettings

GRANULARITY = 16
BYTES_PER_BLOCK = 2 * 2 * 2 * GRANULARITY * 16 * 4  # keys and values, layers, heads, tokens, dimensions, float32

RANDOM_LLAMA = ModelSource(
    kind="random",
    seed=3,
    random_config=json.dumps(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 256,
            "eos_token_id": 257,
        }
    ),
)
"""Tokens below 256 are bytes."""


def random_llama(
    *,
    overlap: int,
    blocks: int,
    chunk: int,
    prefix_cache: bool = True,
    max_seqs: int = 8,
    host_blocks: int = 0,
    recorded: int = 64,
    graphs: Literal["auto", "off", "dispatch"] = "auto",
    cache: Literal["float32", "float8_e4m3"] = "float32",
) -> ResolvedConfig:
    """Its configuration with ``blocks`` usable blocks, and a host pool of ``host_blocks`` behind them where that
    is not 0."""
    block = BYTES_PER_BLOCK if cache == "float32" else BYTES_PER_BLOCK // 4
    return ResolvedConfig(
        name="random",
        served_name="random",
        model=RANDOM_LLAMA,
        threads=1,
        kv=KVConfig(
            dtype=cache,
            granularity=GRANULARITY,
            bytes=(blocks + 1) * block,
            host_bytes=(host_blocks + 1) * block if host_blocks else 0,
        ),
        scheduler=SchedulerSettings(
            max_len=160,
            max_seqs=max_seqs,
            chunk=chunk,
            overlap=overlap,
            prefix_cache=prefix_cache,
            max_recorded_seqs=recorded,
            graphs=graphs,
            capture_prefill_tokens=[8, 32] if graphs == "dispatch" else [],
        ),
        enforce="determinism",
    )


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


class ComposedEngine(Protocol):
    """What a run needs of an engine."""

    @property
    def loop(self) -> EventLoop: ...

    def shutdown(self) -> None: ...


Compose = Callable[[ResolvedConfig, MemoryChannel], ComposedEngine]


def alone(config: ResolvedConfig, channel: MemoryChannel) -> ComposedEngine:
    """An engine of one rank."""
    return compose_engine(config, channel, lambda phase, done=0, total=0, detail="": None)


def run_requests(
    config: ResolvedConfig, requests: Sequence[Submit], gaps: Sequence[int] = (), compose: Compose = alone
) -> Run:
    """Submits the requests in order, each ``gaps[i]`` rounds before the next one, and runs until all ended."""
    channel = MemoryChannel()
    engine = compose(config, channel)
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
