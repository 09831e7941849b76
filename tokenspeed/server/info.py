"""What other programs ask a server about itself, in SGLang's shapes: /version, /get_model_info and /v1/loads."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.messages import PROTOCOL_VERSION
from tokenspeed.messages.snapshot import StateSnapshot
from tokenspeed.server.context import ServerContext, context_of, json_response
from tokenspeed.server.errors import from_frontend
from tokenspeed.server.version import own_version


class VersionBody(msgspec.Struct, kw_only=True):
    """What runs. ``protocol`` is the version of the messages between the processes."""

    version: str
    protocol: int
    recipe: str
    profile: str
    recipe_hash: str


class ModelInfo(msgspec.Struct, kw_only=True):
    """SGLang's fields, and after them ours. There is one version of the weights: nothing replaces them here."""

    model_path: str
    tokenizer_path: str
    is_generation: bool = True
    preferred_sampling_params: dict[str, float | int]
    weight_version: str = "default"
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    model_type: str
    served_model_name: str
    max_model_len: int
    vocab_size: int


class Load(msgspec.Struct, kw_only=True):
    """The engine's load in its last snapshot.

    Attributes:
        num_used_tokens, max_total_num_tokens: of the KV cache, in tokens of its first group that keeps a history; 0
            where no group does.
        token_usage: the first as a share of the second; ``utilization``: running requests as a share of the most.
        gen_throughput: tokens decoded a second, over the last seconds.
        cache_hit_rate: of all prompt tokens looked up since the engine started.
        paused: an operator stopped it.
    """

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int
    paused: bool


class LoadsBody(msgspec.Struct, kw_only=True):
    """``timestamp``: when the snapshot was taken, in seconds since the epoch. One rank, so the sums are its own."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: dict[str, float | int]


async def show_version(request: Request) -> Response:
    """Which version runs, and which recipe."""
    config = context_of(request).llm.config
    body = VersionBody(
        version=own_version(),
        protocol=PROTOCOL_VERSION,
        recipe=config.recipe,
        profile=config.profile,
        recipe_hash=config.recipe_hash,
    )
    return json_response(body)


async def model_info(request: Request) -> Response:
    """What is served."""
    llm = context_of(request).llm
    config = llm.config
    path = config.model.path or config.name
    body = ModelInfo(
        model_path=path,
        tokenizer_path=path,
        preferred_sampling_params=config.api.default_sampling,
        model_type=llm.model.architecture,
        served_model_name=config.served_name,
        max_model_len=llm.max_model_len,
        vocab_size=llm.model.vocab_size,
    )
    return json_response(body)


async def loads(request: Request) -> Response:
    """The engine's load; 503 before its first snapshot."""
    context = context_of(request)
    snapshot = context.llm.engine.snapshot
    if snapshot is None:
        raise from_frontend(context.llm.engine.unavailable())
    load = load_of(context, snapshot)
    body = LoadsBody(
        timestamp=snapshot.time,
        version=own_version(),
        dp_rank_count=1,
        loads=[load],
        aggregate={
            "total_running_reqs": load.num_running_reqs,
            "total_waiting_reqs": load.num_waiting_reqs,
            "total_reqs": load.num_total_reqs,
            "avg_token_usage": load.token_usage,
            "avg_throughput": load.gen_throughput,
            "avg_utilization": load.utilization,
        },
    )
    return json_response(body)


def load_of(context: ServerContext, snapshot: StateSnapshot) -> Load:
    """Returns the load that a snapshot shows."""
    llm = context.llm
    counters = snapshot.counters
    history = next((group for group in snapshot.groups if group.block_granularity), None)
    used, total = (
        (history.held * history.block_granularity, history.total * history.block_granularity) if history else (0, 0)
    )
    most = llm.config.scheduler.max_seqs
    queried = counters.prefix_query_tokens
    return Load(
        num_running_reqs=snapshot.running,
        num_waiting_reqs=snapshot.waiting,
        num_total_reqs=snapshot.running + snapshot.waiting,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=round(used / total, 4) if total else 0.0,
        gen_throughput=round(llm.engine.decode_rate, 2),
        cache_hit_rate=round(counters.prefix_hit_tokens / queried, 4) if queried else 0.0,
        utilization=round(snapshot.running / most, 4),
        max_running_requests=most,
        paused=llm.paused,
    )


def server_info_of(context: ServerContext, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns SGLang's one flat object: every setting, then the state of the rank."""
    engine = context.llm.engine
    states = [load_of(context, engine.snapshot)] if engine.snapshot is not None else []
    return {
        **settings,
        "version": own_version(),
        "status": engine.phase,
        "paused": context.llm.paused,
        "uptime_s": round(time.time() - context.started_at, 1),
        "internal_states": states,
    }
