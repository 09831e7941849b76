"""attention.write, attention.compress and attention.apply_sinks: attention over entries that stand for several tokens
(DeepSeek-V4, 2026).

Common to the first two
    Caches are views [num_blocks, 1, g, width] in the KV dtype, strided (the last stride is 1); block 0 is null, page
    tables are as in attention.py. T and B may be 0.

write: rows as they are
    ``fn(x, cache, slots) -> None``
    x float32 [T, width], may be row-strided; slots int64 [T]. Row t, rounded to the KV dtype, is written at slots[t];
    what lies in block 0, or below 0, is padding and may be left out.

compress: one entry of ``stride`` tokens, once the last of them is there
    ``fn(values_cache, gates_cache, page_table, query_start, seq_lens, bias, norm, eps, cos_sin, entry_cache,
    entry_slots, overlapping) -> None``
    values_cache and gates_cache hold a row [C] for every token, in the KV dtype, or in bfloat16 where that has 8 bits
    (kv_cache.row_dtype); page_table, query_start (int32 [B + 1]) and seq_lens
    (int32 [B]) are theirs, as in attention.extend. bias float32 [stride, C], norm float32 [D], cos_sin float32
    [positions, R]; entry_cache [.., g', D]; entry_slots int64 [T]; overlapping a Python bool.
    For every query t of a row, at position p, where p + 1 is a multiple of stride: the stride tokens that end with p
    become an entry. Each element of it is the sum of the tokens' values times the softmax, over the tokens, of gates +
    bias (the tokens' in order). Where overlapping, C is 2 D: the last D elements of these tokens take part, and the
    first D of the stride tokens before them, with the same bias, unless there are none; else C is D. The sum gets an
    RMS norm (eps, norm), then its last R elements, pairs of neighbours, are rotated by the angles of the first of the
    stride tokens, as in rotary.apply with interleaved. It is rounded to the KV dtype and written at entry_slots[t] //
    stride: entry_slots are those of tokens in blocks of g' * stride. Others are left alone; an entry whose slot lies
    in block 0 is padding.

apply_sinks: what a score without a value takes from an output that was made without it
    ``fn(x, lse, sinks) -> None``
    x float32 [T, Hq, D], contiguous, in place: the output of a softmax over scores the logarithm of whose summed
    exponentials is lse float32 [T, Hq], contiguous; sinks float32 [Hq]. Each head becomes x / (1 + exp(sink - lse)). A
    head that saw no key, with an lse of -inf, becomes 0.

Roles: input, kv; of apply_sinks input and output. Traits: entry_dim (of write, the width; of compress, D); compress has
overlapping and kernel_page_size (g) too; apply_sinks has head_dim (D).
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE
from tokenspeed_kernel.ops.attention import ATTENTION_ROLES
from tokenspeed_kernel.ops.kv_cache import ATTENTION_SIGNATURES, attention_signature, to_cached
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, TraitValue, flag_trait, one_of, size_trait

_ENTRY_TRAIT = {"entry_dim": size_trait("elements of an entry", 512)}

WRITE = declare_operation(
    Operation(
        family="attention",
        mode="write",
        roles=ATTENTION_ROLES,
        traits=_ENTRY_TRAIT,
        arguments="x, cache, slots",
    )
)

COMPRESS = declare_operation(
    Operation(
        family="attention",
        mode="compress",
        roles=ATTENTION_ROLES,
        traits={
            **_ENTRY_TRAIT,
            "overlapping": flag_trait("the tokens before an entry's own take part in it", True),
            PAGE_SIZE_TRAIT: size_trait("tokens of one page of the page table", 64),
        },
        arguments=(
            "values_cache, gates_cache, page_table, query_start, seq_lens, bias, norm, eps, cos_sin, entry_cache, "
            "entry_slots, overlapping"
        ),
    )
)


APPLY_SINKS = declare_operation(
    Operation(
        family="attention",
        mode="apply_sinks",
        roles=ACTIVATION_SIGNATURE.roles,
        traits={"head_dim": size_trait("elements of one head", 512)},
        arguments="x [T, Hq, D] in/out, lse [T, Hq], sinks [Hq]",
    )
)


def _reference_spec(mode: str, tags: frozenset[str], traits: dict[str, TraitBound]) -> KernelSpec:
    return KernelSpec(
        name=f"reference_attention_{mode}",
        family="attention",
        mode=mode,
        solution="reference",
        signatures=ATTENTION_SIGNATURES,
        traits=traits,
        band=Band.REFERENCE,
        tags=tags,
    )


_ALONE = frozenset({"deterministic", "row_invariant"})


@register_kernel(_reference_spec("write", _ALONE, {"entry_dim": Range(1)}))
def reference_write(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """attention.write by PyTorch."""
    slots, page = slots.clamp(min=0), cache.shape[2]
    cache[slots // page, 0, slots % page] = to_cached(x, cache.dtype)


def _rows(cache: torch.Tensor, pages: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """float32 [stop - first, width]: the rows of these positions."""
    places, page = torch.arange(first, stop, device=cache.device), cache.shape[2]
    return cache[pages[places // page].long(), 0, places % page].float()


def _entry(values: torch.Tensor, gates: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [D]: the weighed and normed sum over the tokens of values and gates [n, D]."""
    total = (values * torch.softmax(gates, dim=0)).sum(dim=0)
    return total * torch.rsqrt(total.square().mean() + eps) * norm


@register_kernel(
    _reference_spec(
        "compress",
        _ALONE,  # entry by entry, whatever else is in the call
        {"entry_dim": Range(2), "overlapping": one_of(False, True), PAGE_SIZE_TRAIT: MultipleOf(1)},
    )
)
def reference_compress(
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
    """attention.compress by PyTorch; entry by entry."""
    starts, stride, width, page = query_start.tolist(), bias.shape[0], norm.shape[0], entry_cache.shape[2]
    for row, seq_len in enumerate(seq_lens.tolist()):
        for query in range(starts[row], starts[row + 1]):
            stop = seq_len - (starts[row + 1] - 1 - query)
            if stop < stride or stop % stride:
                continue
            first = stop - stride
            begin = first - stride if overlapping and first else first
            values, gates = (_rows(cache, page_table[row], begin, stop) for cache in (values_cache, gates_cache))
            gates = gates + bias.repeat(gates.shape[0] // stride, 1)
            if overlapping:
                values, gates = (torch.cat([x[:-stride, :width], x[-stride:, width:]]) for x in (values, gates))
            entry = _entry(values, gates, norm, eps)
            cos, sin = cos_sin[first].chunk(2)
            turned = entry[width - cos_sin.shape[1] :].view(-1, 2)
            low, high = turned[:, 0] * cos - turned[:, 1] * sin, turned[:, 1] * cos + turned[:, 0] * sin
            turned.copy_(torch.stack([low, high], dim=1))
            slot = max(0, int(entry_slots[query])) // stride
            entry_cache[slot // page, 0, slot % page] = to_cached(entry, entry_cache.dtype)


@register_kernel(
    KernelSpec(
        name="reference_attention_apply_sinks",
        family="attention",
        mode="apply_sinks",
        solution="reference",
        signatures=frozenset({ACTIVATION_SIGNATURE}),
        traits={"head_dim": Range(1)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_apply_sinks(x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """attention.apply_sinks by PyTorch."""
    x *= torch.sigmoid(lse - sinks).unsqueeze(-1)


def bind_apply_sinks(*, head_dim: int, override: str | None = None) -> Bound:
    """Chooses ``fn(x, lse, sinks)``."""
    return bind("attention", "apply_sinks", ACTIVATION_SIGNATURE, {"head_dim": head_dim}, override=override)


def bind_write(*, entry_dim: int, kv_dtype: torch.dtype, override: str | None = None) -> Bound:
    """Chooses ``fn(x, cache, slots)``."""
    return bind("attention", "write", attention_signature(kv_dtype), {"entry_dim": entry_dim}, override=override)


def bind_compress(
    *, entry_dim: int, overlapping: bool, kernel_page_size: int, kv_dtype: torch.dtype, override: str | None = None
) -> Bound:
    """Chooses ``fn(values_cache, gates_cache, page_table, query_start, seq_lens, bias, norm, eps, cos_sin, entry_cache,
    entry_slots, overlapping)``."""
    traits: dict[str, TraitValue] = {
        "entry_dim": entry_dim,
        "overlapping": overlapping,
        PAGE_SIZE_TRAIT: kernel_page_size,
    }
    return bind("attention", "compress", attention_signature(kv_dtype), traits, override=override)
