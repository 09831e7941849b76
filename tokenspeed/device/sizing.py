"""Decides how much the KV cache takes and how long a sequence may be, before anything of that size is allocated."""

from dataclasses import dataclass

import torch

from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.recipes.host import free_memory_bytes
from tokenspeed.recipes.memory import cpu_pool_bytes, effective_cache_type
from tokenspeed.recipes.model_config import ModelConfig
from tokenspeed.recipes.resolved import GIB, ResolvedConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MemoryPlanError(ValueError):
    """The configuration asks for more than there is; the message has both figures and the knobs."""


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """``num_parents`` without the null parent; a sequence has ``max_model_len`` tokens, ``table_slots`` blocks."""

    num_parents: int
    max_model_len: int
    table_slots: int


def kv_dtype(config: ResolvedConfig, model: ModelConfig) -> torch.dtype:
    """ "auto" is float32 for GGUF and float32 checkpoints, else bfloat16."""
    if config.kv.dtype != "auto":
        return _DTYPES[config.kv.dtype]
    return _DTYPES[effective_cache_type("auto", "gguf" if config.model.kind == "gguf" else model.dtype)]


def cache_size(config: ResolvedConfig, model: ModelConfig, layout: ArenaLayout, *, weight_bytes: int) -> CacheSize:
    """Sizes the cache: kv.bytes where given, else min(max_seqs x max_len, a share of what the weights leave free).

    ``scheduler.max_len`` 0 is the model's context length, or what the cache holds where that is less. Raises
    MemoryPlanError where not even one sequence of an explicit max_len, or one block, fits.
    """
    settings, granularity = config.scheduler, config.kv.granularity
    if settings.max_len > model.context_length:
        raise MemoryPlanError(
            f"scheduler.max_len is {settings.max_len} tokens, the model was made for {model.context_length}; lower it"
        )
    wanted_len = settings.max_len or model.context_length
    per_sequence = slots_for(wanted_len, settings.overlap, granularity)
    budget = cpu_pool_bytes(
        requested=config.kv.bytes,
        # One parent more than the sequences need: the null one.
        wanted=(settings.max_seqs * per_sequence + 1) * layout.parent_bytes,
        free_bytes=free_memory_bytes() - weight_bytes,
    )
    knob = "kv.bytes" if config.kv.bytes else "a quarter of the free memory"
    parents = budget // layout.parent_bytes - 1
    if parents < 1 or (settings.max_len and parents < per_sequence):
        need = (per_sequence if settings.max_len else 1) + 1
        raise MemoryPlanError(
            f"the KV cache may take {budget / GIB:.3f} GiB ({knob}), {need} blocks of {granularity} tokens need "
            f"{need * layout.parent_bytes / GIB:.3f} GiB; raise kv.bytes, or lower scheduler.max_len or kv.granularity"
        )
    held = parents * granularity
    return CacheSize(
        num_parents=parents,
        max_model_len=min(wanted_len, held),
        table_slots=slots_for(min(wanted_len, held), settings.overlap, granularity),
    )


def slots_for(length: int, overlap: int, granularity: int) -> int:
    """Blocks that cover ``length`` tokens and the ones that overlapping steps may add beyond it."""
    return -(-(length + overlap) // granularity)
