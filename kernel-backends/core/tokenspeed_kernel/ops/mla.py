"""attention.mla_prologue, mla_decode, mla_decode_partial and mla_extend: latent attention over a paged cache.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed: the cache holds one latent vector a token, shared
by all heads, and the rotated part of the key. The up-projection of the keys is folded into the queries beforehand and
that of the values into the output afterwards (``gemm.head_linear``), so that attention itself runs over the latents.

Common to all
    Hq query heads; L elements of the latent (512), R of the rotary part (64), P of a query head's plain part.
    ``latent_cache``: a view [num_blocks, 1, g, L + R] in the KV dtype, strided (the last stride is 1): the latent, then
    the rotated key. Block 0 is null, page tables and slots are as in attention.py. T and B may be 0.

mla_prologue: the only writer of the latent cache
    ``fn(q, compressed, positions, cos_sin, latent_norm, eps, latent_cache, slots) -> None``
    q             float32 [T, Hq, P + R]; the last R elements of every head are rotated in place.
    compressed    float32 [T, L + R], may be row-strided; what it holds afterwards is unspecified.
    positions, cos_sin (float32 [positions, R]), eps, slots: as in attention.gqa_prologue, also how pairs are rotated.
    latent_norm   float32 [L].
    The first L elements of ``compressed`` get an RMS norm, its last R are rotated; both, rounded to the KV dtype, are
    written at their slots.

mla_decode
    ``fn(q_latent, q_rope, latent_cache, page_table, seq_lens, scale, out, lse) -> None``
    q_latent float32 [B*W, Hq, L] and q_rope float32 [B*W, Hq, R], the heads of a row at any stride; out float32
    [B*W, Hq, L], contiguous; lse float32 [B*W, Hq], or None where nobody needs it.
    Each row has W = (q rows) / B queries, at its last W positions. Scores (q_latent · latent + q_rope · key) * scale of
    the positions up to the query's own, weights their softmax in float32, output the weighted sum of the latents; lse
    the logarithm of the sum of the exponentials of the scores. A query that sees no key gives zeros and -inf.

mla_decode_partial
    ``fn(q_latent, q_rope, latent_cache, page_table, seq_lens, scale, out, lse) -> None``
    The same with out [S, B*W, Hq, L] and lse [S, B*W, Hq]: split s of S takes a row's positions from s*c to (s+1)*c -
    1, c = ceil(ceil(seq_len / g) / S) * g. A query that sees no key of a split gets zeros and -inf there, exactly.
    ``attention.merge_partials`` makes the output of them, the same within rounding whatever S is.

mla_extend
    ``fn(q_latent, q_rope, latent_cache, page_table, query_start, seq_lens, scale, out) -> None``
    As mla_decode, with the queries of the rows as in attention.extend: a chunk behind a prefix of any length.

Roles: input, kv. Traits: latent_dim (L), rotary_dim (R); of the prologue also plain_dim (P), of the others
kernel_page_size (g) and activations (attention_rounding.py).
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.attention import ATTENTION_ROLES
from tokenspeed_kernel.ops.attention_rounding import ACTIVATIONS_TRAIT, bind_reader
from tokenspeed_kernel.ops.kv_cache import ATTENTION_SIGNATURES, attention_signature, to_cached
from tokenspeed_kernel.ops.paged_reference import ScoreRules, attend_row
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, TraitValue, Vocabulary, size_trait

_LATENT_TRAITS = {
    "latent_dim": size_trait("elements of the latent that all heads share", 512),
    "rotary_dim": size_trait("elements of the rotated part of a key", 64),
}
_PROLOGUE_TRAITS = {**_LATENT_TRAITS, "plain_dim": size_trait("elements of a query head that are not rotated", 128)}
_READ_TRAITS = {
    **_LATENT_TRAITS,
    PAGE_SIZE_TRAIT: size_trait("tokens of one page of the page table", 64),
    "activations": ACTIVATIONS_TRAIT,
}
_READ_ARGUMENTS = "q_latent, q_rope, latent_cache, page_table, seq_lens, scale, out, lse"


def _declare(mode: str, traits: Vocabulary, arguments: str) -> Operation:
    return declare_operation(
        Operation(family="attention", mode=mode, roles=ATTENTION_ROLES, traits=traits, arguments=arguments)
    )


MLA_PROLOGUE = _declare(
    "mla_prologue",
    _PROLOGUE_TRAITS,
    "q, compressed, positions, cos_sin, latent_norm, eps, latent_cache, slots",
)
MLA_DECODE = _declare("mla_decode", _READ_TRAITS, _READ_ARGUMENTS)
MLA_DECODE_PARTIAL = _declare("mla_decode_partial", _READ_TRAITS, _READ_ARGUMENTS)
MLA_EXTEND = _declare(
    "mla_extend", _READ_TRAITS, "q_latent, q_rope, latent_cache, page_table, query_start, seq_lens, scale, out"
)


def _reference_spec(mode: str, traits: dict[str, TraitBound]) -> KernelSpec:
    return KernelSpec(
        name=f"reference_attention_{mode}",
        family="attention",
        mode=mode,
        solution="reference",
        signatures=ATTENTION_SIGNATURES,
        traits={"latent_dim": Range(1), "rotary_dim": MultipleOf(2), **traits},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )


_PAGES: dict[str, TraitBound] = {PAGE_SIZE_TRAIT: MultipleOf(1)}


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


@register_kernel(_reference_spec("mla_prologue", {"plain_dim": Range(1)}))
def reference_mla_prologue(
    q: torch.Tensor,
    compressed: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    latent_norm: torch.Tensor,
    eps: float,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """attention.mla_prologue by PyTorch."""
    rotary, granularity = cos_sin.shape[1], latent_cache.shape[2]
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    turned = q[..., q.shape[-1] - rotary :]
    turned.copy_(_rotate(turned, cos.unsqueeze(1), sin.unsqueeze(1)))
    latent, key = torch.split(compressed, [latent_norm.shape[0], rotary], dim=-1)
    normed = latent * torch.rsqrt(latent.square().mean(dim=-1, keepdim=True) + eps) * latent_norm
    slots = slots.clamp(min=0)
    entry = torch.cat([normed, _rotate(key, cos, sin)], dim=-1)
    latent_cache[slots // granularity, 0, slots % granularity] = to_cached(entry, latent_cache.dtype)


def _attend(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    latent: int,
    pages: torch.Tensor,
    seq_len: int,
    scale: float,
    part: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: the keys are whole cache entries, the values their first ``latent`` elements."""
    return attend_row(q, latent_cache, latent_cache[..., :latent], pages, seq_len, ScoreRules(scale), part)


@register_kernel(_reference_spec("mla_decode_partial", _PAGES))
def reference_mla_decode_partial(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """attention.mla_decode_partial by PyTorch."""
    if seq_lens.shape[0] == 0:
        return
    q, splits, granularity = torch.cat([q_latent, q_rope], dim=-1), out.shape[0], latent_cache.shape[2]
    width = q.shape[0] // seq_lens.shape[0]
    for row, seq_len in enumerate(seq_lens.tolist()):
        queries = slice(row * width, (row + 1) * width)
        pages = -(-seq_len // granularity)
        share = -(-pages // splits) * granularity
        for split in range(splits):
            part = (min(split * share, seq_len), min((split + 1) * share, seq_len))
            found = _attend(q[queries], latent_cache, q_latent.shape[-1], page_table[row], seq_len, scale, part)
            out[split, queries], lse[split, queries] = found


@register_kernel(_reference_spec("mla_decode", _PAGES))
def reference_mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """attention.mla_decode by PyTorch: one split."""
    total = out.new_empty(out.shape[:2]) if lse is None else lse
    reference_mla_decode_partial(
        q_latent, q_rope, latent_cache, page_table, seq_lens, scale, out.unsqueeze(0), total.unsqueeze(0)
    )


@register_kernel(_reference_spec("mla_extend", _PAGES))
def reference_mla_extend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """attention.mla_extend by PyTorch."""
    q, starts = torch.cat([q_latent, q_rope], dim=-1), query_start.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        out[queries] = _attend(q[queries], latent_cache, q_latent.shape[-1], page_table[row], seq_len, scale)[0]


def bind_mla_prologue(
    *, latent_dim: int, rotary_dim: int, plain_dim: int, kv_dtype: torch.dtype, override: str | None = None
) -> Bound:
    """Chooses ``fn(q, compressed, positions, cos_sin, latent_norm, eps, latent_cache, slots)``."""
    traits = {"latent_dim": latent_dim, "rotary_dim": rotary_dim, "plain_dim": plain_dim}
    return bind("attention", "mla_prologue", attention_signature(kv_dtype), traits, override=override)


def bind_mla_read(
    mode: str,
    *,
    latent_dim: int,
    rotary_dim: int,
    kernel_page_size: int,
    kv_dtype: torch.dtype,
    activations: str | None = None,
    override: str | None = None,
) -> Bound:
    """Chooses the kernel of ``mode``, which is "mla_decode", "mla_decode_partial" or "mla_extend"; raises ValueError
    for another. ``activations``: as in attention_rounding.bind_reader."""
    modes = ("mla_decode", "mla_decode_partial", "mla_extend")
    if mode not in modes:
        raise ValueError(f"{mode!r} does not read a latent cache; use one of {', '.join(modes)}")
    traits: dict[str, TraitValue] = {
        "latent_dim": latent_dim,
        "rotary_dim": rotary_dim,
        PAGE_SIZE_TRAIT: kernel_page_size,
    }
    return bind_reader(mode, kv_dtype, traits, activations, override)
