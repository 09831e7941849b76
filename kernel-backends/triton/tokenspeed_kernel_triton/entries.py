"""attention.write, compress, apply_sinks and index_prologue on the device; contracts in tokenspeed_kernel.ops.

Each token, or entry, is computed by programs of its own, so its bits depend on no other.
"""

import torch

from tokenspeed_kernel_triton.device import loadable
from tokenspeed_kernel_triton.loading import Launch, power_of_two

STRETCH = 1024
"""Elements of a row that one block writes."""


def write_of(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Launch:
    """The launch that writes rows as they are."""
    tokens, width = x.shape
    arguments = (x, loadable(cache), slots, width, x.stride(0), cache.stride(0), cache.stride(2))
    constants = {"PAGE": cache.shape[2], "BLOCK": min(STRETCH, power_of_two(width))}
    return Launch("entries", "write", (tokens, -(-width // STRETCH)), arguments, constants)


def write(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """attention.write."""
    if x.shape[0]:
        write_of(x, cache, slots).run()


def apply_sinks_of(x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Launch:
    """The launch of x / (1 + exp(sink - lse))."""
    tokens, heads, width = x.shape
    constants = {"HEADS": heads, "DIM": width, "BLOCK": power_of_two(width)}
    return Launch("entries", "apply_sinks", (tokens * heads,), (x, lse, sinks), constants, warps=1)


def apply_sinks(x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """attention.apply_sinks."""
    if x.shape[0]:
        apply_sinks_of(x, lse, sinks).run()


def index_prologue_of(
    q: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    index_cache: torch.Tensor,
    slots: torch.Tensor,
) -> Launch:
    """The launch of the indexer's prologue."""
    tokens, heads, width = q.shape
    half = cos_sin.shape[1] // 2
    tensors = (q, key, positions, cos_sin, norm_weight, norm_bias, float(eps), loadable(index_cache), slots)
    strides = (q.stride(0), key.stride(0), cos_sin.stride(0), index_cache.stride(0), index_cache.stride(2))
    constants = {
        "HEADS": heads,
        "DIM": width,
        "HALF": half,
        "BLOCK_HALF": power_of_two(half),
        "BLOCK_REST": power_of_two(width - 2 * half),
        "PAGE": index_cache.shape[2],
    }
    return Launch("entries", "index_prologue", (tokens, heads + 1), (*tensors, *strides), constants, warps=1)


def index_prologue(
    q: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    index_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """attention.index_prologue."""
    if q.shape[0]:
        index_prologue_of(q, key, positions, cos_sin, norm_weight, norm_bias, eps, index_cache, slots).run()


def compress_of(
    values_cache: torch.Tensor,
    gates_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    entry_cache: torch.Tensor,
    entry_slots: torch.Tensor,
    overlapping: bool,
) -> Launch:
    """The launch that makes the entries that end with a token of the call."""
    width, rotary = norm.shape[0], cos_sin.shape[1]
    caches = (loadable(values_cache), loadable(gates_cache))
    tensors = (*caches, page_table, query_start, seq_lens, bias, norm, float(eps), cos_sin)
    strides = (
        page_table.stride(0),
        *(cache.stride(axis) for cache in (values_cache, gates_cache) for axis in (0, 2)),
        cos_sin.stride(0),
        entry_cache.stride(0),
        entry_cache.stride(2),
    )
    constants = {
        "STRIDE": bias.shape[0],
        "DIM": width,
        "ROTARY": rotary,
        "OVERLAPPING": overlapping,
        "BLOCK_PLAIN": power_of_two(width - rotary),
        "BLOCK_HALF": power_of_two(rotary // 2),
        "PAGE": values_cache.shape[2],
        "ENTRY_PAGE": entry_cache.shape[2],
    }
    arguments = (*tensors, loadable(entry_cache), entry_slots, seq_lens.shape[0], *strides)
    return Launch("entries", "compress", (entry_slots.shape[0],), arguments, constants)


def compress(
    values_cache: torch.Tensor,
    gates_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    entry_cache: torch.Tensor,
    entry_slots: torch.Tensor,
    overlapping: bool,
) -> None:
    """attention.compress."""
    if entry_slots.shape[0] and seq_lens.shape[0]:
        caches = (values_cache, gates_cache, page_table, query_start, seq_lens)
        compress_of(*caches, bias, norm, eps, cos_sin, entry_cache, entry_slots, overlapping).run()
