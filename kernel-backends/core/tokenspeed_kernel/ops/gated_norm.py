"""norm.gated_rms: the RMS norm of heads, times a function of a gate.

Contract
    ``fn(x, gate, weight, eps, silu, out) -> None``: out = x / sqrt(mean(x², over D) + eps) * weight * f(gate), head by
    head; f(g) = g / (1 + exp(-g)) where ``silu``, a Python bool, is true (Gated DeltaNet), else 1 / (1 + exp(-g)) (Kimi
    Delta Attention).
    x and out float32 [T, H, D], contiguous; out may be x itself. gate float32 [T, H, D], whose rows may be apart (a
    part of a projection's output). weight float32 [D], the same for every head; eps a Python float. Nothing else
    overlaps. T may be 0.

Roles: input, weight, output. Traits: gate, "silu" or "sigmoid", as calls say it.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.norm import NORM_SIGNATURE
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.traits import OneOf, TraitDeclaration, one_of

GATES = ("silu", "sigmoid")

GATED_RMS = declare_operation(
    Operation(
        family="norm",
        mode="gated_rms",
        roles=NORM_SIGNATURE.roles,
        traits={"gate": TraitDeclaration((OneOf,), str, "the gate's function: " + " or ".join(GATES), "silu")},
        arguments="x [T, H, D], gate [T, H, D], weight [D], eps, silu, out [T, H, D]",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_norm_gated_rms",
        family="norm",
        mode="gated_rms",
        solution="reference",
        signatures=frozenset({NORM_SIGNATURE}),
        traits={"gate": one_of(*GATES)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_gated_rms(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, silu: bool, out: torch.Tensor
) -> None:
    """norm.gated_rms by PyTorch."""
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
    out.copy_(normed * (torch.nn.functional.silu(gate) if silu else torch.sigmoid(gate)))


def bind_gated_rms_norm(*, gate: str, override: str | None = None) -> Bound:
    """Chooses ``fn(x, gate, weight, eps, silu, out)``."""
    return bind("norm", "gated_rms", NORM_SIGNATURE, {"gate": gate}, override=override)
