"""recurrent.gated_delta: the gated delta rule over the tokens of each row, its state in paged blocks.

Gated DeltaNet (arXiv:2412.06464), and Kimi Delta Attention (arXiv:2510.26692), whose decay is one for each channel of
the key. What those models compute of a token's decay, beta, q and k before the rule is part of the operation.

Contract
    ``fn(q, k, v, decay, beta, rate, bias, eps, state, starts, sources, targets, out) -> None``
    q, k     float32 [T, Hk, Dk]. v float32 [T, Hv, Dv], Hv = v_per_k * Hk; value head h reads key head h // v_per_k.
    decay    float32 [T, Hv], or [T, Hv, Dk] with the trait decay "channel"; beta float32 [T, Hv]; both before their
             functions, as a projection gives them.
             Rows of these five may be apart (views of one buffer); the elements of a row are dense.
    rate     float32 [Hv], above 0: exp(A_log) of a checkpoint. bias float32 [Hv], or [Hv, Dk]: its dt_bias. eps a
             Python float.
    state    float32 view [blocks, Hv, 1, Dk * Dv], strided (the last stride is 1): of each head a matrix S [Dk, Dv].
    starts, sources, targets   as in recurrent.causal_conv, rows without tokens, shared sources and block 0 included.
    out      float32 [T, Hv, Dv], contiguous.
    For each token of a row and each value head, in order:
    q' = q / sqrt(sum(q²) + eps) / sqrt(Dk),  k' = k / sqrt(sum(k²) + eps)
    d = exp(-rate * log(1 + exp(decay + bias))), one for all Dk or one for each;  b = 1 / (1 + exp(-beta))
    S = d * S (row by row of S);  u = b * (v - k'ᵀ S);  S = S + k' uᵀ;  out = q'ᵀ S.
    Nothing else overlaps. T and B may be 0.
    Tag "row_invariant": the bits depend neither on other rows nor on how a row's tokens are cut into calls. The rule is
    taken token by token for that: what is added up in blocks of tokens rounds as the blocks lie.

Roles: input, state. Traits: key_dim (Dk), value_dim (Dv), v_per_k, decay.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import OneOf, Range, TraitDeclaration, TraitValue, one_of, size_trait

DELTA_SIGNATURE = FormatSignature.of(input=FLOAT32, state=FLOAT32)

DECAYS = ("head", "channel")

GATED_DELTA = declare_operation(
    Operation(
        family="recurrent",
        mode="gated_delta",
        roles=DELTA_SIGNATURE.roles,
        traits={
            "key_dim": size_trait("elements of a key head", 128),
            "value_dim": size_trait("elements of a value head", 128),
            "v_per_k": size_trait("value heads that share a key head", 2),
            "decay": TraitDeclaration((OneOf,), str, "what has a decay of its own: " + " or ".join(DECAYS), "head"),
        },
        arguments="q, k, v, decay, beta, rate, bias, eps, state, starts, sources, targets, out",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_recurrent_gated_delta",
        family="recurrent",
        mode="gated_delta",
        solution="reference",
        signatures=frozenset({DELTA_SIGNATURE}),
        traits={"key_dim": Range(1), "value_dim": Range(1), "v_per_k": Range(1), "decay": one_of(*DECAYS)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )
)
def reference_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """recurrent.gated_delta by PyTorch."""
    heads, key_dim, value_dim = v.shape[1], k.shape[2], v.shape[2]
    for row, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        first, stop = int(starts[row]), int(starts[row + 1])
        if first == stop:
            continue
        if source:
            matrix = state[source, :, 0].clone().view(heads, key_dim, value_dim)
        else:
            matrix = v.new_zeros(heads, key_dim, value_dim)
        for token in range(first, stop):
            log_decay = -rate.view(-1, 1) * torch.nn.functional.softplus(decay[token] + bias).view(heads, -1)
            matrix, out[token] = _step(
                matrix,
                _normed(q[token], heads, eps) * key_dim**-0.5,
                _normed(k[token], heads, eps),
                v[token],
                torch.exp(log_decay),
                torch.sigmoid(beta[token]),
            )
        if target:
            state[target, :, 0] = matrix.view(heads, -1)


def _normed(x: torch.Tensor, heads: int, eps: float) -> torch.Tensor:
    """x [Hk, Dk] with heads of length 1, [Hv, Dk]."""
    length = torch.sqrt(x.square().sum(dim=-1, keepdim=True) + eps)
    return (x / length).repeat_interleave(heads // x.shape[0], dim=0)


def _step(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state [Hv, Dk, Dv] behind a token, and its output [Hv, Dv]."""
    matrix = matrix * decay.unsqueeze(-1)
    update = (v - (matrix * k.unsqueeze(-1)).sum(dim=1)) * beta.unsqueeze(-1)
    matrix = matrix + k.unsqueeze(-1) * update.unsqueeze(1)
    return matrix, (matrix * q.unsqueeze(-1)).sum(dim=1)


def bind_gated_delta(*, key_dim: int, value_dim: int, v_per_k: int, decay: str, override: str | None = None) -> Bound:
    """Chooses ``fn(q, k, v, decay, beta, rate, bias, eps, state, starts, sources, targets, out)``."""
    traits: dict[str, TraitValue] = {"key_dim": key_dim, "value_dim": value_dim, "v_per_k": v_per_k, "decay": decay}
    return bind("recurrent", "gated_delta", DELTA_SIGNATURE, traits, override=override)
