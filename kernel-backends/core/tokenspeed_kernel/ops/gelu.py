"""activation.gelu_tanh_and_mul: the gate of Gemma's MLPs.

    ``fn(gate, up, out) -> None``: tensors as those of activation.silu_and_mul; out = gelu(gate) * up, where
    gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))) (arXiv:1606.08415), which is g times the sigmoid
    of twice that argument.

Roles: input, output. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel

GELU_TANH_AND_MUL = declare_operation(
    Operation(
        family="activation",
        mode="gelu_tanh_and_mul",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="gate [T, I], up [T, I], out [T, I]",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_activation_gelu_tanh_and_mul",
        family="activation",
        mode="gelu_tanh_and_mul",
        solution="reference",
        signatures=frozenset({ACTIVATION_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_gelu_tanh_and_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """activation.gelu_tanh_and_mul by PyTorch, as a sigmoid: 1 + tanh cancels where the gate is far below zero."""
    inner = 2.0 * (2.0 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    out.copy_(gate * torch.sigmoid(inner) * up)


def bind_gelu_tanh_and_mul(*, override: str | None = None) -> Bound:
    """Chooses ``fn(gate, up, out)``."""
    return bind("activation", "gelu_tanh_and_mul", ACTIVATION_SIGNATURE, {}, override=override)
