"""rotary.apply: rotary position embedding of heads, in place.

Contract
    ``fn(x, positions, axes, cos_sin, interleaved) -> None``
    x         float32 [T, heads, D], changed in place; rows and heads at any stride, the elements of a head dense: the
              last elements of wider heads, say.
    positions int32 [A, T]: A axes of positions; 1 for text, 3 for the time, height and width of multimodal models.
    axes      int32 [R/2]: which axis the angle of each pair follows; None where A is 1.
    cos_sin   float32 [P, R], as ``rotary_tables`` makes it: cosines in the first R/2 columns, sines in the last. R is
              even and at most D; elements from R on are left alone, bit by bit.
    interleaved  a Python bool: pair i is the elements i and i + R/2 where False, 2i and 2i + 1 where True.
    With c = cos_sin[positions[axes[i], t], i] and s = cos_sin[positions[axes[i], t], R/2 + i], the pair (a, b) becomes
    (a * c - b * s, b * c + a * s). T may be 0.

The prologues of attention rotate too; this is for what they do not do: pairs of neighbours that nobody permuted, and
several axes (mrope). Roles: input. Traits: head_dim, interleaved (whether True may be given), axes (A).
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import Range, flag_trait, one_of, size_trait

ROTARY_SIGNATURE = FormatSignature.of(input=FLOAT32)

APPLY = declare_operation(
    Operation(
        family="rotary",
        mode="apply",
        roles=ROTARY_SIGNATURE.roles,
        traits={
            "head_dim": size_trait("elements of one head", 64),
            "interleaved": flag_trait("pairs are neighbours", False),
            "axes": size_trait("axes of positions", 1),
        },
        arguments="x [T, heads, D] in/out, positions int32 [A, T], axes int32 [R/2] or None, cos_sin, interleaved",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_rotary_apply",
        family="rotary",
        mode="apply",
        solution="reference",
        signatures=frozenset({ROTARY_SIGNATURE}),
        traits={"head_dim": Range(2), "interleaved": one_of(False, True), "axes": Range(1)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_apply(
    x: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    """The contract above by PyTorch."""
    rotary = cos_sin.shape[1]
    half = rotary // 2
    axis = torch.zeros(half, dtype=torch.int64, device=x.device) if axes is None else axes.long()
    place = positions.long()[axis].T  # [T, R/2]: the row of the table for each pair
    pair = torch.arange(half, device=x.device)
    cos, sin = cos_sin[place, pair].unsqueeze(1), cos_sin[place, pair + half].unsqueeze(1)
    turned = x[..., :rotary]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    first.copy_(rotated[0])
    second.copy_(rotated[1])


def bind_rotary(*, head_dim: int, interleaved: bool = False, axes: int = 1, override: str | None = None) -> Bound:
    """Chooses ``fn(x, positions, axes, cos_sin, interleaved)``."""
    traits = {"head_dim": head_dim, "interleaved": interleaved, "axes": axes}
    return bind("rotary", "apply", ROTARY_SIGNATURE, traits, override=override)
