"""Decides how much the KV cache takes and how long a sequence may be, before anything of that size is allocated."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.device.placement import HOST, Placement
from tokenspeed.layers.communication import ALONE, Communication
from tokenspeed.recipes.capacity import CacheShape, PoolSize, parents_for, size_pool, wanted_bytes
from tokenspeed.recipes.dimensions import dimensions_of
from tokenspeed.recipes.host import free_memory_bytes
from tokenspeed.recipes.memory import LATER_TERMS, cpu_pool_bytes, device_terms, effective_cache_type
from tokenspeed.recipes.model_config import ModelConfig
from tokenspeed.recipes.resolved import GIB, ResolvedConfig
from tokenspeed.recipes.schema import Parallel

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}

STATE_SLOTS = 2
"""A state group's table has two slots, input and live."""


class MemoryPlanError(ValueError):
    """The configuration asks for more than there is; the message has both figures and the knobs."""


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """``num_parents`` without the null parent; a sequence has ``max_model_len`` tokens, ``table_slots`` blocks.

    ``kv_tokens`` is the longest request that the pool could hold.
    """

    num_parents: int
    kv_tokens: int
    max_model_len: int
    table_slots: int


def kv_dtype(config: ResolvedConfig, model: ModelConfig) -> torch.dtype:
    """ "auto" is float32 for float32 checkpoints, float16 for GGUF, else bfloat16."""
    if config.kv.dtype != "auto":
        return _DTYPES[config.kv.dtype]
    return _DTYPES[effective_cache_type("auto", "gguf" if config.model.kind == "gguf" else model.dtype)]


def cache_size(
    config: ResolvedConfig,
    model: ModelConfig,
    layout: ArenaLayout,
    *,
    placement: Placement = HOST,
    weight_bytes: int,
    communication: Communication = ALONE,
) -> CacheSize:
    """Sizes the cache: kv.bytes where given, else on the host min(max_seqs x max_len, a share of what the weights leave
    free), of which ranks have the machine's memory evenly, and on a device what is left for it there. Ranks have caches
    of one size: the least that any of them can have.

    ``scheduler.max_len`` 0 is the model's context length, or what the cache holds where that is less. Raises
    MemoryPlanError where not even one sequence of an explicit max_len, or one block, fits.
    """
    settings, granularity = config.scheduler, config.kv.granularity
    wanted_len = longest_request(config, model)
    shape = CacheShape(facts=layout.facts, parent_bytes=layout.parent_bytes)
    if placement.is_host:
        budget = cpu_pool_bytes(
            requested=config.kv.bytes,
            wanted=wanted_bytes(settings, shape, granularity=granularity, wanted_len=wanted_len),
            free_bytes=free_memory_bytes() // communication.world - weight_bytes - config.kv.host_bytes,
        )
    else:
        budget = config.kv.bytes or _left_on(placement, config, model, communication)
    budget = _least(budget, communication)
    pool = size_pool(settings, shape, granularity=granularity, wanted_len=wanted_len, budget=budget)
    if pool.holds < 1 or (settings.max_len and pool.parents < pool.per_request):
        _refuse(config, shape, pool, budget)
    return CacheSize(
        num_parents=pool.parents,
        kv_tokens=pool.holds,
        max_model_len=pool.max_len,
        table_slots=max(slots_for(pool.max_len, settings.overlap, granularity), STATE_SLOTS),
    )


def longest_request(config: ResolvedConfig, model: ModelConfig) -> int:
    """Tokens that a request may have where the cache holds them. Raises MemoryPlanError where the configuration asks
    for more than the model was made for."""
    if config.scheduler.max_len > model.context_length:
        raise MemoryPlanError(
            f"scheduler.max_len is {config.scheduler.max_len} tokens, the model was made for {model.context_length}; "
            "lower it"
        )
    return config.scheduler.max_len or model.context_length


def _left_on(placement: Placement, config: ResolvedConfig, model: ModelConfig, communication: Communication) -> int:
    """Bytes of kv.fraction of the device that are left for the cache. The model is there already, with its buffers, and
    so is what others have there; what comes later is estimated as in a plan."""
    beside = device_terms(dimensions_of(model), Parallel(tp=communication.world), config.scheduler)
    kept = sum(term.bytes for term in beside if term.name in LATER_TERMS)
    free, total = placement.memory()
    return max(0, free - int(total * (1 - config.kv.fraction)) - kept)


def _least(value: int, communication: Communication) -> int:
    found = torch.tensor([value], dtype=torch.int64)
    communication.minimum(found)
    return int(found)


def _refuse(config: ResolvedConfig, shape: CacheShape, pool: PoolSize, budget: int) -> NoReturn:
    least = parents_for(config.scheduler, shape.facts, 2, granularity=config.kv.granularity)
    need = (pool.per_request if config.scheduler.max_len else least) + 1
    knob = "a quarter of the free memory" if config.device == "cpu" else "what weights and buffers leave of kv.fraction"
    knob = "kv.bytes" if config.kv.bytes else knob
    raise MemoryPlanError(
        f"the KV cache may take {budget / GIB:.3f} GiB ({knob}), {need} parents of {shape.parent_bytes} bytes "
        f"need {need * shape.parent_bytes / GIB:.3f} GiB; raise kv.bytes, or lower scheduler.max_len or kv.granularity"
    )


def host_parents(config: ResolvedConfig, layout: ArenaLayout) -> int:
    """Usable parents of the host pool, the null one set aside; 0 where none is asked for.

    Raises MemoryPlanError where not even one parent fits, or a storage tier is asked for without a host pool.
    """
    if not config.kv.host_bytes:
        if config.kv.storage_dir:
            raise MemoryPlanError(
                "kv.storage_dir needs kv.host_bytes: blocks go to the storage and come from it by the host pool; "
                "set --host-cache-gb"
            )
        return 0
    parents = config.kv.host_bytes // layout.parent_bytes - 1
    if parents < 1:
        raise MemoryPlanError(
            f"kv.host_bytes is {config.kv.host_bytes / GIB:.6f} GiB, the least host pool is two parents of "
            f"{layout.parent_bytes} bytes ({2 * layout.parent_bytes / GIB:.6f} GiB); raise --host-cache-gb, or set "
            "it to 0"
        )
    return parents


def storage_limit(config: ResolvedConfig) -> int:
    """Bytes the storage directory may grow to: as asked for, else a tenth of its file system."""
    if config.kv.storage_bytes:
        return config.kv.storage_bytes
    place = Path(config.kv.storage_dir)
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).total // 10


def slots_for(length: int, overlap: int, granularity: int) -> int:
    """Blocks that cover ``length`` tokens and the ones that overlapping steps may add beyond it."""
    return -(-(length + overlap) // granularity)
