"""attention.gqa_prologue, attention.decode and attention.extend: grouped-query attention over a paged cache.

Common to the three
    Hq query heads, Hkv KV heads, Hq = q_per_kv * Hkv; query head h reads KV head h // q_per_kv; D = head_dim.
    ``k_cache``, ``v_cache``: views [num_blocks, Hkv, g, D] in the KV dtype (kv_cache.py), strided (the last stride is
    1).
    Block 0 is null: padding is written there and nobody reads it.
    Page p of row b is the block ``page_table[b, p]`` and holds the row's positions p*g … p*g + g-1. Table entries
    beyond ceil(seq_len / g) are not read. T and B may be 0.

gqa_prologue: the only writer of KV
    ``fn(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots) -> None``
    q         float32 [T, Hq, D], changed in place.
    k, v      float32 [T, Hkv, D]; what they hold afterwards is unspecified. q, k and v may be row-strided views of
              one [T, (Hq + 2 Hkv) * D] buffer; the heads of a row are dense.
    positions int32 [T].
    cos_sin   float32 [P, R]: cosines in the first R/2 columns, sines in the last. R = D, or an even R below D with
              the trait partial_rotary: then only the first R elements of a head are rotated.
    q_norm, k_norm  float32 [D], both given or both None, as the trait qk_norm says; eps a Python float.
    slots     int64 [T]: slot = block * g + offset. A slot below 0 or in block 0 is padding: it lands in block 0, in
              any order.
    First, per-head RMS norm of q and k where weights are given. Then rotary of q and k, pairing i with i + R/2:
    x'[i] = x[i] * cos[i] - x[i + R/2] * sin[i] and x'[i + R/2] = x[i + R/2] * cos[i] + x[i] * sin[i]. Then k and v,
    rounded to the KV dtype (kv_cache.py), are written at their slots. A checkpoint that pairs neighbours
    has the rows of its q and k weights permuted when it is loaded.

decode
    ``fn(q, k_cache, v_cache, page_table, seq_lens, scale, window, out) -> None``
    q, out float32 [B*W, Hq, D]; page_table int32 [B, max_pages], its row stride its own; seq_lens int32 [B].
    Each row has W = (q rows) / B queries, at its last W positions. W = 1 is plain decode.

extend
    ``fn(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out) -> None``
    The same with query_start int32 [B + 1]: row b has the n_b queries query_start[b] … query_start[b+1] - 1, at its
    last n_b positions.

Both of them
    q may be row-strided (a view of the fused buffer); out is contiguous. ``window`` is a Python int: 0 for none, else
    the positions that a query sees, its own the last of them. The query at position p reads the keys at first … p,
    first = 0 without a window, max(0, p - window + 1) with one: scores q·k * scale, weights their softmax in float32,
    output the weighted sum of v. A row with seq_len 0 and a query at a position below 0 give zeros. Rows of out that
    belong to no row are left alone. Pages before the one with the first key of a row's first query are not read, nor
    are their table entries (the cache has dropped them), and cost nothing: with a window, time does not grow with p.
    Tag "row_invariant": the bits of a query's output depend neither on other queries, nor on the chunking, nor on
    which of the two operations computed it; the keys are taken in fixed tiles from position 0.

    Sinks and soft cap: bound with the trait sinks or soft_cap, a kernel is called with two more arguments behind out,
    ``sinks`` (float32 [Hq], None for none) and ``soft_cap`` (a Python float, 0.0 for none); bound without both, it is
    never given them. A soft cap c above 0 replaces the scaled score s of a key by c * tanh(s / c). A head's sink is one
    more score in its softmax, after the cap, that has no value: the weights then sum to less than 1.

Roles: input, kv. Traits of the prologue: head_dim, q_per_kv, qk_norm, partial_rotary; of the others: head_dim,
q_per_kv, kernel_page_size (g), causal, windowed (whether a window above 0 may be given), sinks, soft_cap, activations
(attention_rounding.py).
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.attention_rounding import ACTIVATIONS_TRAIT, bind_reader
from tokenspeed_kernel.ops.kv_cache import ATTENTION_SIGNATURES, attention_signature, to_cached
from tokenspeed_kernel.ops.paged_reference import ScoreRules, attend_row
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, TraitValue, flag_trait, one_of, size_trait

ATTENTION_ROLES = frozenset({"input", "kv"})

_HEAD_TRAITS = {
    "head_dim": size_trait("elements of one head", 64),
    "q_per_kv": size_trait("query heads that share a KV head", 3),
}
_READ_TRAITS = {
    **_HEAD_TRAITS,
    PAGE_SIZE_TRAIT: size_trait("tokens of one page of the page table", 64),
    "causal": flag_trait("a query reads no keys beyond its own position", True),
    "windowed": flag_trait("a window above 0 may be given", False, default=False),
    "sinks": flag_trait("the call gives a sink score for each head", False, default=False),
    "soft_cap": flag_trait("the call caps its scores", False, default=False),
    "activations": ACTIVATIONS_TRAIT,
}

GQA_PROLOGUE = declare_operation(
    Operation(
        family="attention",
        mode="gqa_prologue",
        roles=ATTENTION_ROLES,
        traits={
            **_HEAD_TRAITS,
            "qk_norm": flag_trait("q and k are normed per head", False),
            "partial_rotary": flag_trait("cos_sin is narrower than a head", False, default=False),
        },
        arguments="q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots",
    )
)

DECODE = declare_operation(
    Operation(
        family="attention",
        mode="decode",
        roles=ATTENTION_ROLES,
        traits=_READ_TRAITS,
        arguments="q, k_cache, v_cache, page_table, seq_lens, scale, window, out",
    )
)

EXTEND = declare_operation(
    Operation(
        family="attention",
        mode="extend",
        roles=ATTENTION_ROLES,
        traits=_READ_TRAITS,
        arguments="q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out",
    )
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


_READ_BOUNDS: dict[str, TraitBound] = {
    "head_dim": Range(1),
    "q_per_kv": Range(1),
    PAGE_SIZE_TRAIT: MultipleOf(1),
    "causal": one_of(True),
    "windowed": one_of(False, True),
    "sinks": one_of(False, True),
    "soft_cap": one_of(False, True),
}


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first R elements of the heads of x [T, heads, D] by the angles whose cos and sin are [T, 1, R/2]."""
    half = cos.shape[-1]
    low, high, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


@register_kernel(
    _reference_spec(
        "gqa_prologue",
        {
            "head_dim": MultipleOf(2),
            "q_per_kv": Range(1),
            "qk_norm": one_of(False, True),
            "partial_rotary": one_of(False, True),
        },
    )
)
def reference_gqa_prologue(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """attention.gqa_prologue by PyTorch."""
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    normed_q = q if q_norm is None else _head_norm(q, q_norm, eps)
    normed_k = k if k_norm is None else _head_norm(k, k_norm, eps)
    q.copy_(_rotate(normed_q, cos, sin))
    granularity = k_cache.shape[2]
    slots = slots.clamp(min=0)
    block, offset = slots // granularity, slots % granularity
    k_cache[block, :, offset] = to_cached(_rotate(normed_k, cos, sin), k_cache.dtype)
    v_cache[block, :, offset] = to_cached(v, v_cache.dtype)


@register_kernel(_reference_spec("extend", _READ_BOUNDS))
def reference_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """attention.extend by PyTorch: each row's keys and values are gathered, then a softmax over them in float32."""
    starts, rules = query_start.tolist(), ScoreRules(scale, window, soft_cap, sinks)
    for row, seq_len in enumerate(seq_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        out[queries] = attend_row(q[queries], k_cache, v_cache, page_table[row], seq_len, rules)[0]


@register_kernel(_reference_spec("decode", _READ_BOUNDS))
def reference_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """attention.decode by PyTorch: an extend of W queries in every row."""
    rows = seq_lens.shape[0]
    if rows == 0:
        return
    width = q.shape[0] // rows
    query_start = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=seq_lens.device)
    reference_extend(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out, sinks, soft_cap)


def bind_gqa_prologue(
    *,
    head_dim: int,
    q_per_kv: int,
    qk_norm: bool,
    partial_rotary: bool = False,
    kv_dtype: torch.dtype,
    override: str | None = None,
) -> Bound:
    """Chooses ``fn(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots)``."""
    traits = {"head_dim": head_dim, "q_per_kv": q_per_kv, "qk_norm": qk_norm, "partial_rotary": partial_rotary}
    return bind("attention", "gqa_prologue", attention_signature(kv_dtype), traits, override=override)


def _bind_read(
    mode: str,
    head_dim: int,
    q_per_kv: int,
    kernel_page_size: int,
    flags: dict[str, bool],
    kv_dtype: torch.dtype,
    activations: str | None,
    override: str | None,
) -> Bound:
    traits: dict[str, TraitValue] = {
        "head_dim": head_dim,
        "q_per_kv": q_per_kv,
        PAGE_SIZE_TRAIT: kernel_page_size,
        "causal": True,
        **flags,
    }
    return bind_reader(mode, kv_dtype, traits, activations, override)


def bind_attention_decode(
    *,
    head_dim: int,
    q_per_kv: int,
    kernel_page_size: int,
    windowed: bool = False,
    sinks: bool = False,
    soft_cap: bool = False,
    kv_dtype: torch.dtype,
    activations: str | None = None,
    override: str | None = None,
) -> Bound:
    """Chooses ``fn(q, k_cache, v_cache, page_table, seq_lens, scale, window, out)``; ``window`` is 0 unless
    ``windowed``, and ``sinks, soft_cap`` follow where one of these is set. ``activations``: as in bind_reader."""
    flags = {"windowed": windowed, "sinks": sinks, "soft_cap": soft_cap}
    return _bind_read("decode", head_dim, q_per_kv, kernel_page_size, flags, kv_dtype, activations, override)


def bind_attention_extend(
    *,
    head_dim: int,
    q_per_kv: int,
    kernel_page_size: int,
    windowed: bool = False,
    sinks: bool = False,
    soft_cap: bool = False,
    kv_dtype: torch.dtype,
    activations: str | None = None,
    override: str | None = None,
) -> Bound:
    """Chooses ``fn(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out)``; ``window`` is 0
    unless ``windowed``, and ``sinks, soft_cap`` follow where one of these is set. ``activations``: as in
    bind_reader."""
    flags = {"windowed": windowed, "sinks": sinks, "soft_cap": soft_cap}
    return _bind_read("extend", head_dim, q_per_kv, kernel_page_size, flags, kv_dtype, activations, override)
