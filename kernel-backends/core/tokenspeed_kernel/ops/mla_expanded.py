"""attention.mla_extend_expanded: latent attention of a chunk with keys and values taken out of their latents.

The same attention as ``attention.mla_extend`` with the products around it (mla.py), in the other order: instead of
taking the queries to the latents and what was attended back to the values, the up-projection makes each head's keys and
values of the latents (DeepSeek-V2, arXiv:2405.04434, section 2.1). A pair of a query and a key then costs P + R + V
multiply-adds a head, where it costs 2 L + R absorbed: 320 for 1088 with the sizes of DeepSeek. A key costs L (P + V)
besides, once for all queries of a call, where an absorbed query does. So it is for chunks of many tokens.

Contract
    Registered callable: a factory ``make(weight: QuantizedTensor, heads: int) -> fn``. The factory may keep the
    weight's planes and must not change them.
    weight        [Hq * (P + V), L], the up-projection as checkpoints have it: of each head first the P rows that make
                  the plain part of its key, then the V rows that make its value.
    ``fn(q, latent_cache, page_table, query_start, seq_lens, scale, out) -> None``
    q             float32 [T, Hq, P + R], may be row-strided; the last R elements of a head are rotated.
    latent_cache, page_table, query_start, seq_lens: as in attention.mla_extend.
    out           float32 [T, Hq, V], contiguous.
    The key of a head at a position is its P rows times the position's latent, then the R elements of the entry that
    are rotated; its value is the V rows times the latent. Scores q·k * scale of the positions up to the query's own,
    weights their softmax in float32, output the weighted sum of the values. A query that sees no key gives zeros; rows
    of out that belong to no row are left alone. T and B may be 0.
    A kernel tagged "row_invariant" gives a query the same bits however its prompt is cut. They are not the bits of
    attention.mla_extend: who mixes both gives up that a token's bits do not depend on its chunk.

Under the activations "bfloat16" (attention_rounding.py) keys and values are rounded too, once they are expanded.

Roles: input, kv, weight. Traits: latent_dim (L), rotary_dim (R), plain_dim (P), value_dim (V), kernel_page_size,
activations.
"""

from collections.abc import Callable

import torch

from tokenspeed_kernel.binding import Bound, bind, present_objective
from tokenspeed_kernel.ops.attention_rounding import ACTIVATIONS_TRAIT, ROUNDED, allowed_rounding
from tokenspeed_kernel.ops.kv_cache import KV_FORMATS, kv_format
from tokenspeed_kernel.ops.paged_reference import gather
from tokenspeed_kernel.ops.ragged import reference_ragged
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.selection import SelectionError, choose
from tokenspeed_kernel.signature import FLOAT32, WEIGHT_FORMATS, FormatSignature, TensorFormat
from tokenspeed_kernel.traits import MultipleOf, Range, TraitValue, size_trait

MLA_EXTEND_EXPANDED = declare_operation(
    Operation(
        family="attention",
        mode="mla_extend_expanded",
        roles=frozenset({"input", "kv", "weight"}),
        traits={
            "latent_dim": size_trait("elements of the latent that all heads share", 512),
            "rotary_dim": size_trait("elements of the rotated part of a key", 64),
            "plain_dim": size_trait("elements of a query head that are not rotated", 128),
            "value_dim": size_trait("elements of one head's value", 128),
            PAGE_SIZE_TRAIT: size_trait("tokens of one page of the page table", 64),
            "activations": ACTIVATIONS_TRAIT,
        },
        bound=("weight", "heads"),
        arguments="q, latent_cache, page_table, query_start, seq_lens, scale, out",
    )
)


def expanded_signature(kv: TensorFormat, weight: TensorFormat) -> FormatSignature:
    """The signature for a cache and an up-projection of these formats."""
    return FormatSignature.of(input=FLOAT32, kv=kv, weight=weight)


@register_kernel(
    KernelSpec(
        name="reference_attention_mla_extend_expanded",
        family="attention",
        mode="mla_extend_expanded",
        solution="reference",
        signatures=frozenset(expanded_signature(kv, weight) for kv in KV_FORMATS for weight in WEIGHT_FORMATS.values()),
        traits={
            "latent_dim": Range(1),
            "rotary_dim": MultipleOf(2),
            "plain_dim": Range(1),
            "value_dim": Range(1),
            PAGE_SIZE_TRAIT: MultipleOf(1),
        },
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def make_reference_mla_extend_expanded(weight: QuantizedTensor, heads: int) -> Callable[..., None]:
    """The contract above by PyTorch; the weight is dequantised once, a row's keys and values are expanded whole."""
    matrices = weight.dequantize().reshape(heads, weight.shape[0] // heads, weight.shape[1])

    def mla_extend_expanded(
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        page_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        latent = matrices.shape[2]
        plain = q.shape[2] - (latent_cache.shape[3] - latent)
        for row, seq_len in enumerate(seq_lens.tolist()):
            entries = gather(latent_cache, page_table[row], 0, seq_len)[0]
            latents, rotated = entries[:, :latent], entries[:, latent:]
            expanded = torch.einsum("sl,hel->she", latents, matrices)
            keys = torch.cat([expanded[..., :plain], rotated.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
            ends = query_start.new_zeros(2)
            ends[1] = seq_len
            reference_ragged(q, keys, expanded[..., plain:], query_start[row : row + 2], ends, scale, out, None, True)

    return mla_extend_expanded


def bind_mla_extend_expanded(
    weight: QuantizedTensor,
    heads: int,
    *,
    rotary_dim: int,
    plain_dim: int,
    kernel_page_size: int,
    kv_dtype: torch.dtype,
    activations: str | None = None,
    override: str | None = None,
    reference: bool = True,
) -> Bound | None:
    """Chooses and makes ``fn(q, latent_cache, page_table, query_start, seq_lens, scale, out)`` for an up-projection.

    ``activations``: as in attention_rounding.bind_reader. ``reference``: whether the reference will do unasked; where
    it will not, and nothing else can run, the answer is None. Raises SelectionError where nothing fits, ValueError
    where the rows of the weight are no heads with a key of ``plain_dim`` and a value.
    """
    rows, latent = weight.shape
    if heads < 1 or rows % heads or rows // heads <= plain_dim:
        raise ValueError(
            f"{weight.source}: {rows} rows are not {heads} heads of {plain_dim} rows for a key and some for a value"
        )
    signature = expanded_signature(kv_format(kv_dtype), weight.tensor_format)
    traits: dict[str, TraitValue] = {
        "latent_dim": latent,
        "rotary_dim": rotary_dim,
        "plain_dim": plain_dim,
        "value_dim": rows // heads - plain_dim,
        PAGE_SIZE_TRAIT: kernel_page_size,
    }
    bound = {"weight": weight, "heads": heads}
    operation = ("attention", "mla_extend_expanded", signature)
    if allowed_rounding(activations) == ROUNDED:
        try:
            return bind(*operation, {**traits, "activations": ROUNDED}, override=override, bound=bound)
        except SelectionError:
            pass  # nothing rounds here
    if not reference:
        found = choose(*operation, traits, override=override, objective=present_objective())
        if found.spec.band is Band.REFERENCE and found.override is None:
            return None
    return bind(*operation, traits, override=override, bound=bound)
