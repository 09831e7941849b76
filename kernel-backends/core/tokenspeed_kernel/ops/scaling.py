"""activation.scale_rows: each row times a number of its own, or all of them times one.

    ``fn(x, factors, places, out) -> None``: x and out float32 [T, N], contiguous; out may be x itself. factors
    float32 [P]; places int32 [T], each in [0, P), or None, where every row takes factors[0].
    out[t] = x[t] * factors[places[t]], one product each. T may be 0.

Gemma's embeddings are scaled by one number, Mistral 4's queries by one that grows with the position.

Roles: input, output. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel

SCALE_ROWS = declare_operation(
    Operation(
        family="activation",
        mode="scale_rows",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="x [T, N], factors [P], places int32 [T] or None, out [T, N]",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_activation_scale_rows",
        family="activation",
        mode="scale_rows",
        solution="reference",
        signatures=frozenset({ACTIVATION_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )
)
def reference_scale_rows(
    x: torch.Tensor, factors: torch.Tensor, places: torch.Tensor | None, out: torch.Tensor
) -> None:
    """activation.scale_rows by PyTorch."""
    torch.mul(x, factors[:1] if places is None else factors[places.long()].unsqueeze(1), out=out)


def bind_scale_rows(*, override: str | None = None) -> Bound:
    """Chooses ``fn(x, factors, places, out)``."""
    return bind("activation", "scale_rows", ACTIVATION_SIGNATURE, {}, override=override)
