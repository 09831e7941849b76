"""attention.index_prologue, index_select and mla_selected: sparse attention over a paged cache.

DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, 2025): an indexer with small heads scores what the cache holds, and latent
attention reads the best entries of each query only. The indexer's keys are cached beside the latents, one a token.
DeepSeek-V4 does the same with entries that stand for several tokens each.

Common to all
    Hi heads of the indexer with D elements; Hq query heads; L and R as in mla.py. Caches are views
    [num_blocks, 1, g, width] in the KV dtype, strided (the last stride is 1), g entries in a page; block 0 is null. T
    and B may be 0. Row b of B has the queries query_start[b] … query_start[b + 1] - 1 (int32 [B + 1]), which stand at
    its last positions, as in attention.extend. Entries of a row are numbered from 0 in the order of the sequence.

index_prologue: the only writer of the indexer's keys
    ``fn(q, key, positions, cos_sin, norm_weight, norm_bias, eps, index_cache, slots) -> None``
    q           float32 [T, Hi, D], may be row-strided; the first R elements of every head are rotated in place.
    key         float32 [T, D], may be row-strided; what it holds afterwards is unspecified.
    norm_weight, norm_bias  float32 [D].
    positions, cos_sin (float32 [positions, R]), slots: as in attention.gqa_prologue, also how pairs are rotated.
    ``key`` gets a layer norm, (x - mean) / sqrt(variance + eps) * norm_weight + norm_bias, its first R elements are
    rotated; it is rounded to the KV dtype and written at its slot.

index_select
    ``fn(q, weights, index_cache, page_table, query_start, seq_lens, stride, selected) -> None``
    q float32 [T, Hi, D], may be row-strided; weights float32 [T, Hi], contiguous; seq_lens int32 [B], in tokens;
    selected int32 [T, k], contiguous. An entry stands for ``stride`` tokens, a Python int: the query at position p sees
    the entries 0 … (p + 1) // stride - 1. The score of an entry is the sum over the heads of weight * max(q · key, 0).
    ``selected`` gets the k best of those that the query sees, in ascending order, and -1 behind them where there are
    fewer. Of equal scores the lower entry is better; a NaN is better than any number, so that it does not go unseen.
    The rows of ``selected`` that belong to no row are left alone. A kernel tagged "row_invariant" chooses the same
    whatever else is in the call.

mla_selected
    ``fn(q_latent, q_rope, latent_cache, page_table, query_start, selected, scale, out, lse) -> None``
    q_latent float32 [T, Hq, L] and q_rope float32 [T, Hq, R], the heads of a row at any stride; R may be 0.
    selected int32 [T, k] as index_select leaves it: each query's own entries. out float32 [T, Hq, L], contiguous; lse
    float32 [T, Hq], or None where nobody needs it. What is computed is as in mla_decode, over the selected entries
    only. A query without any gives zeros and -inf; rows of out and lse that belong to no row are left alone.

Roles: input, kv. Traits: index_select and mla_selected have kernel_page_size (g, in entries), mla_selected also
activations (attention_rounding.py).
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.attention import ATTENTION_ROLES
from tokenspeed_kernel.ops.attention_rounding import ACTIVATIONS_TRAIT, bind_reader
from tokenspeed_kernel.ops.kv_cache import ATTENTION_SIGNATURES, attention_signature, to_cached
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, TraitValue, Vocabulary, size_trait

_WIDTH_TRAIT = {"index_dim": size_trait("elements of one head of the indexer", 128)}
_PAGE_TRAIT = {PAGE_SIZE_TRAIT: size_trait("entries of one page of the page table", 64)}


def _declare(mode: str, traits: Vocabulary, arguments: str) -> Operation:
    return declare_operation(
        Operation(family="attention", mode=mode, roles=ATTENTION_ROLES, traits=traits, arguments=arguments)
    )


INDEX_PROLOGUE = _declare(
    "index_prologue",
    {**_WIDTH_TRAIT, "rotary_dim": size_trait("elements of a head that are rotated", 64)},
    "q, key, positions, cos_sin, norm_weight, norm_bias, eps, index_cache, slots",
)
INDEX_SELECT = _declare(
    "index_select",
    {**_WIDTH_TRAIT, "index_heads": size_trait("heads of the indexer", 64), **_PAGE_TRAIT},
    "q, weights, index_cache, page_table, query_start, seq_lens, stride, selected",
)
MLA_SELECTED = _declare(
    "mla_selected",
    {
        "latent_dim": size_trait("elements of the latent that all heads share", 512),
        "rotary_dim": size_trait("elements of the rotated part of a key, 0 where a key is its latent", 64),
        **_PAGE_TRAIT,
        "activations": ACTIVATIONS_TRAIT,
    },
    "q_latent, q_rope, latent_cache, page_table, query_start, selected, scale, out, lse",
)


def _reference_spec(mode: str, traits: dict[str, TraitBound]) -> KernelSpec:
    return KernelSpec(
        name=f"reference_attention_{mode}",
        family="attention",
        mode=mode,
        solution="reference",
        signatures=ATTENTION_SIGNATURES,
        traits=traits,
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )


def _entries(cache: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """float32 [*places.shape, width]: the entries ``places`` of a row with these pages."""
    granularity = cache.shape[2]
    blocks = pages[places // granularity].long()
    return cache[blocks, 0, places % granularity].float()


@register_kernel(_reference_spec("index_prologue", {"index_dim": Range(2), "rotary_dim": MultipleOf(2)}))
def reference_index_prologue(
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
    """attention.index_prologue by PyTorch."""
    rotary, granularity = cos_sin.shape[1], index_cache.shape[2]
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    normed = torch.nn.functional.layer_norm(key, key.shape[1:], norm_weight, norm_bias, eps)
    for x, cosine, sine in ((q, cos.unsqueeze(1), sin.unsqueeze(1)), (normed, cos, sin)):
        low, high = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
        turned = low * cosine - high * sine, high * cosine + low * sine
        low.copy_(turned[0])
        high.copy_(turned[1])
    slots = slots.clamp(min=0)
    index_cache[slots // granularity, 0, slots % granularity] = to_cached(normed, index_cache.dtype)


@register_kernel(
    _reference_spec("index_select", {"index_dim": Range(1), "index_heads": Range(1), PAGE_SIZE_TRAIT: MultipleOf(1)})
)
def reference_index_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    stride: int,
    selected: torch.Tensor,
) -> None:
    """attention.index_select by PyTorch; row by row, head by head."""
    starts = query_start.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        count, length = queries.stop - queries.start, seq_len // stride
        if not count:
            continue
        keys = _entries(index_cache, page_table[row], torch.arange(length, device=q.device))
        scores = q.new_zeros(count, length)
        for head in range(q.shape[1]):
            scores += weights[queries, head, None] * torch.relu(q[queries, head] @ keys.T)
        seen = (torch.arange(seq_len - count, seq_len, device=q.device) + 1) // stride
        scores.masked_fill_(torch.arange(length, device=q.device) >= seen.unsqueeze(1), -torch.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : selected.shape[1]]
        order = order.masked_fill(order >= seen.unsqueeze(1), length).sort(dim=1).values
        selected[queries] = -1
        selected[queries, : order.shape[1]] = order.masked_fill(order == length, -1).to(torch.int32)


@register_kernel(
    _reference_spec("mla_selected", {"latent_dim": Range(1), "rotary_dim": Range(0), PAGE_SIZE_TRAIT: MultipleOf(1)})
)
def reference_mla_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """attention.mla_selected by PyTorch; query by query."""
    q, starts = torch.cat([q_latent, q_rope], dim=-1), query_start.tolist()
    for row in range(len(starts) - 1):
        for query in range(starts[row], starts[row + 1]):
            places = selected[query][selected[query] >= 0].long()
            entries = _entries(latent_cache, page_table[row], places)
            scores = q[query] @ entries.T * scale
            total = torch.logsumexp(scores, dim=1)
            weights = torch.exp(scores - torch.where(total.isneginf(), 0.0, total).unsqueeze(1))
            out[query] = weights @ entries[:, : q_latent.shape[2]]
            if lse is not None:
                lse[query] = total


def bind_index_prologue(
    *, index_dim: int, rotary_dim: int, kv_dtype: torch.dtype, override: str | None = None
) -> Bound:
    """Chooses ``fn(q, key, positions, cos_sin, norm_weight, norm_bias, eps, index_cache, slots)``."""
    traits: dict[str, TraitValue] = {"index_dim": index_dim, "rotary_dim": rotary_dim}
    return bind("attention", "index_prologue", attention_signature(kv_dtype), traits, override=override)


def bind_index_select(
    *, index_dim: int, index_heads: int, kernel_page_size: int, kv_dtype: torch.dtype, override: str | None = None
) -> Bound:
    """Chooses ``fn(q, weights, index_cache, page_table, query_start, seq_lens, stride, selected)``."""
    traits: dict[str, TraitValue] = {
        "index_dim": index_dim,
        "index_heads": index_heads,
        PAGE_SIZE_TRAIT: kernel_page_size,
    }
    return bind("attention", "index_select", attention_signature(kv_dtype), traits, override=override)


def bind_mla_selected(
    *,
    latent_dim: int,
    rotary_dim: int,
    kernel_page_size: int,
    kv_dtype: torch.dtype,
    activations: str | None = None,
    override: str | None = None,
) -> Bound:
    """Chooses ``fn(q_latent, q_rope, latent_cache, page_table, query_start, selected, scale, out, lse)``.
    ``activations``: as in attention_rounding.bind_reader."""
    traits: dict[str, TraitValue] = {
        "latent_dim": latent_dim,
        "rotary_dim": rotary_dim,
        PAGE_SIZE_TRAIT: kernel_page_size,
    }
    return bind_reader("mla_selected", kv_dtype, traits, activations, override)
