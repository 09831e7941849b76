"""activation.silu_and_mul: out = silu(gate) * up.

Contract
    ``fn(gate, up, out) -> None``: float32 [T, I] each; silu(g) = g / (1 + exp(-g)). gate and up may be row-strided
    (the halves of one [T, 2I] buffer): their last stride is 1, their row stride is their own. out is contiguous and
    overlaps neither. T may be 0.

Roles: input, output. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature

ACTIVATION_SIGNATURE = FormatSignature.of(input=FLOAT32, output=FLOAT32)

SILU_AND_MUL = declare_operation(
    Operation(
        family="activation",
        mode="silu_and_mul",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="gate [T, I], up [T, I], out [T, I]",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_activation_silu_and_mul",
        family="activation",
        mode="silu_and_mul",
        solution="reference",
        signatures=frozenset({ACTIVATION_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_silu_and_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """activation.silu_and_mul by PyTorch."""
    out.copy_(torch.nn.functional.silu(gate) * up)


def bind_silu_and_mul(*, override: str | None = None) -> Bound:
    """Chooses ``fn(gate, up, out)``."""
    return bind("activation", "silu_and_mul", ACTIVATION_SIGNATURE, {}, override=override)
