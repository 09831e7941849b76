"""What a configuration needs of memory: bytes of KV cache a token, and the size of the pool. No torch here.

One reading of the rules for the plan that is printed and for the engine that allocates.
"""

from tokenspeed.recipes.model_config import ModelConfig
from tokenspeed.recipes.schema import CACHE_TYPE_BYTES, CacheGroup

CPU_SHARE = 4
"""On the CPU the KV cache takes at most one part in so many of the memory that is free."""


def effective_cache_type(requested: str, stored: str) -> str:
    """Resolves "auto": float32 where the checkpoint is float32 or GGUF, else bfloat16.

    ``stored`` is the checkpoint's type as ModelConfig.dtype or a recipe's weight format says it.
    """
    if requested != "auto":
        return requested
    half = stored.lower() in ("bfloat16", "float16")
    return "bfloat16" if half else "float32"


def groups_of_model(config: ModelConfig) -> list[CacheGroup]:
    """The cache groups of a dense decoder: one that keeps keys and values of every layer."""
    values = 2 * config.num_kv_heads * config.head_dim
    return [CacheGroup(id="full", layers=config.num_layers, values_per_layer=values)]


def group_bytes_per_token(group: CacheGroup, cache_type: str, tensor_parallel: int = 1) -> int:
    """Bytes that one token leaves in ``group`` on one rank."""
    ranks = 1 if group.replicated else tensor_parallel
    return group.layers * group.values_per_layer * CACHE_TYPE_BYTES[cache_type] // ranks


def cpu_pool_bytes(*, requested: int, wanted: int, free_bytes: int) -> int:
    """Size of the KV cache on the CPU: as asked for, else what all sequences can use (``wanted``), at most a quarter of
    what is free once the weights are in."""
    if requested:
        return requested
    return min(wanted, max(0, free_bytes) // CPU_SHARE)
