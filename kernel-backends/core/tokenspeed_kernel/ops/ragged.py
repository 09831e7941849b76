"""attention.ragged: queries over keys and values that lie side by side, not in pages.

Latent attention's prefill: a chunk's keys and values, taken out of their latents by ``gemm.head_linear``, cost far less
to attend to than the latents themselves. Its prefix is done the same way, part by part, without a mask, and
``attention.merge_partials`` puts the parts together.

Contract
    ``fn(q, k, v, query_start, key_start, scale, out, lse, causal) -> None``
    q float32 [T, Hq, D], k float32 [S, Hkv, D], v float32 [S, Hkv, Dv]: rows and heads at any stride, elements dense;
    Hq = q_per_kv * Hkv, query head h reads KV head h // q_per_kv. query_start and key_start int32 [B + 1]: row b has
    the queries query_start[b] … query_start[b+1] - 1 and the keys key_start[b] … key_start[b+1] - 1. out float32
    [T, Hq, Dv], contiguous; lse float32 [T, Hq], or None where nobody needs it. T, S and B may be 0.
    ``causal``, a Python bool: a row's n queries stand at the last n positions of its keys and see none beyond their
    own; where False, every query sees all keys of its row. Scores q·k * scale, weights their softmax in float32,
    output the weighted sum of v, lse the logarithm of the sum of the exponentials of the scores. A query that sees no
    key gives zeros and -inf. Rows of out and lse that belong to no row are left alone.

Under the activations "bfloat16" (attention_rounding.py) keys and values are rounded too.

Roles: input, output. Traits: head_dim (D), value_dim (Dv), q_per_kv, causal, activations.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.attention_rounding import ACTIVATIONS_TRAIT, ROUNDED, allowed_rounding
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.selection import SelectionError
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import Range, TraitValue, flag_trait, one_of, size_trait

RAGGED_SIGNATURE = FormatSignature.of(input=FLOAT32, output=FLOAT32)

RAGGED = declare_operation(
    Operation(
        family="attention",
        mode="ragged",
        roles=RAGGED_SIGNATURE.roles,
        traits={
            "head_dim": size_trait("elements of one head of q and k", 192),
            "value_dim": size_trait("elements of one head of v", 128),
            "q_per_kv": size_trait("query heads that share a KV head", 1),
            "causal": flag_trait("a query reads no keys beyond its own position", True),
            "activations": ACTIVATIONS_TRAIT,
        },
        arguments="q, k, v, query_start, key_start, scale, out, lse, causal",
    )
)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: out [n, Hq, Dv] and lse [n, Hq]."""
    (queries, query_heads, _), (keys, heads, _) = q.shape, k.shape
    grouped = q.reshape(queries, heads, query_heads // heads, -1)
    scores = torch.einsum("nhgd,lhd->nhgl", grouped, k) * scale
    if causal:
        key = torch.arange(keys, device=q.device)
        hidden = key > torch.arange(keys - queries, keys, device=q.device).unsqueeze(1)
        scores.masked_fill_(hidden[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(torch.isneginf(lse), 0.0, lse).unsqueeze(-1))
    out = torch.einsum("nhgl,lhd->nhgd", weights, v)
    return out.reshape(queries, query_heads, -1), lse.reshape(queries, query_heads)


@register_kernel(
    KernelSpec(
        name="reference_attention_ragged",
        family="attention",
        mode="ragged",
        solution="reference",
        signatures=frozenset({RAGGED_SIGNATURE}),
        traits={"head_dim": Range(1), "value_dim": Range(1), "q_per_kv": Range(1), "causal": one_of(False, True)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
) -> None:
    """The contract above by PyTorch."""
    starts, key_starts = query_start.tolist(), key_start.tolist()
    for row in range(len(starts) - 1):
        queries, keys = slice(*starts[row : row + 2]), slice(*key_starts[row : row + 2])
        if queries.start == queries.stop:
            continue
        result, total = _attend(q[queries], k[keys], v[keys], scale, causal)
        out[queries] = result
        if lse is not None:
            lse[queries] = total


def bind_attention_ragged(
    *,
    head_dim: int,
    value_dim: int,
    q_per_kv: int,
    causal: bool,
    activations: str | None = None,
    override: str | None = None,
) -> Bound:
    """Chooses ``fn(q, k, v, query_start, key_start, scale, out, lse, causal)``. ``activations``: as in
    attention_rounding.bind_reader."""
    operation = ("attention", "ragged", RAGGED_SIGNATURE)
    traits: dict[str, TraitValue] = {
        "head_dim": head_dim,
        "value_dim": value_dim,
        "q_per_kv": q_per_kv,
        "causal": causal,
    }
    if allowed_rounding(activations) == ROUNDED:
        try:
            return bind(*operation, {**traits, "activations": ROUNDED}, override=override)
        except SelectionError:
            pass  # nothing rounds here
    return bind(*operation, traits, override=override)
