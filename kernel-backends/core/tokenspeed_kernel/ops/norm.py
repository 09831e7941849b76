"""norm.rms and norm.fused_add_rms.

Contract
    ``rms(x, weight, eps, out) -> None``: out = x / sqrt(mean(x², over H) + eps) * weight, row by row.
    ``fused_add_rms(x, residual, weight, eps, out) -> None``: residual += x, then out = rms(residual).
    x, residual, out float32 [T, H]; weight float32 [H]; eps a Python float; all contiguous. out may be x itself;
    otherwise nothing overlaps. T may be 0.

Roles: input, weight, output. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature

NORM_SIGNATURE = FormatSignature.of(input=FLOAT32, weight=FLOAT32, output=FLOAT32)

RMS = declare_operation(
    Operation(
        family="norm",
        mode="rms",
        roles=NORM_SIGNATURE.roles,
        arguments="x [T, H], weight [H], eps, out [T, H]",
    )
)

FUSED_ADD_RMS = declare_operation(
    Operation(
        family="norm",
        mode="fused_add_rms",
        roles=NORM_SIGNATURE.roles,
        arguments="x [T, H], residual [T, H] in/out, weight [H], eps, out [T, H]",
    )
)


def _reference_spec(mode: str) -> KernelSpec:
    return KernelSpec(
        name=f"reference_norm_{mode}",
        family="norm",
        mode=mode,
        solution="reference",
        signatures=frozenset({NORM_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )


@register_kernel(_reference_spec("rms"))
def reference_rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """norm.rms by PyTorch."""
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    out.copy_(x * scale * weight)


@register_kernel(_reference_spec("fused_add_rms"))
def reference_fused_add_rms(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """norm.fused_add_rms by PyTorch."""
    residual += x
    reference_rms(residual, weight, eps, out)


def bind_rms_norm(*, override: str | None = None) -> Bound:
    """Chooses ``fn(x, weight, eps, out)``."""
    return bind("norm", "rms", NORM_SIGNATURE, {}, override=override)


def bind_fused_add_rms_norm(*, override: str | None = None) -> Bound:
    """Chooses ``fn(x, residual, weight, eps, out)``."""
    return bind("norm", "fused_add_rms", NORM_SIGNATURE, {}, override=override)
