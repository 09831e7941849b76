"""activation.sigmoid_gate and activation.add: how the parts of a block are put together.

sigmoid_gate: out = x * sigmoid(gate)
    ``fn(x, gate, out) -> None``: x and out float32 [T, N], contiguous; out may be x itself. gate float32 [T, G],
    which may be row-strided; G divides N, and each gate is that of the N / G elements in its place: G = N gates every
    element (the output of attention in Qwen3-Next), G = 1 a row (its shared expert). T may be 0.

add: out += x
    ``fn(x, out) -> None``: float32 [T, N] both, contiguous, not overlapping. T may be 0.

Roles: input, output. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel

SIGMOID_GATE = declare_operation(
    Operation(
        family="activation",
        mode="sigmoid_gate",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="x [T, N], gate [T, G], out [T, N]",
    )
)

ADD = declare_operation(
    Operation(
        family="activation",
        mode="add",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="x [T, N], out [T, N] in/out",
    )
)


def _reference_spec(mode: str) -> KernelSpec:
    return KernelSpec(
        name=f"reference_activation_{mode}",
        family="activation",
        mode=mode,
        solution="reference",
        signatures=frozenset({ACTIVATION_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )


@register_kernel(_reference_spec("sigmoid_gate"))
def reference_sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """activation.sigmoid_gate by PyTorch."""
    rows, count = gate.shape
    parts = x.view(rows, count, x.shape[1] // count)
    out.copy_((parts * torch.sigmoid(gate).unsqueeze(-1)).view(x.shape))


@register_kernel(_reference_spec("add"))
def reference_add(x: torch.Tensor, out: torch.Tensor) -> None:
    """activation.add by PyTorch."""
    out.add_(x)


def bind_sigmoid_gate(*, override: str | None = None) -> Bound:
    """Chooses ``fn(x, gate, out)``."""
    return bind("activation", "sigmoid_gate", ACTIVATION_SIGNATURE, {}, override=override)


def bind_add(*, override: str | None = None) -> Bound:
    """Chooses ``fn(x, out)``."""
    return bind("activation", "add", ACTIVATION_SIGNATURE, {}, override=override)
