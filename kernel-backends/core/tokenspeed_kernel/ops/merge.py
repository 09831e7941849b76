"""attention.merge_partials: one attention output from those over parts of the keys.

Contract
    ``fn(partials, partial_lse, out, lse) -> None``
    partials float32 [S, T, H, D], partial_lse float32 [S, T, H], out float32 [T, H, D], all contiguous; lse float32
    [T, H], or None where nobody needs it. S is at least 1, T may be 0. Nothing overlaps, but with S = 1 out may be
    ``partials[0]``.
    A partial_lse is the logarithm of the sum of the exponentials of a part's scores, -inf where the part has no key;
    the partial there is not used, whatever it holds. lse = log(sum over s of exp(partial_lse[s])), and out is the sum
    over s of exp(partial_lse[s] - lse) * partials[s], parts in the order of s. Where every part is empty: zeros and
    -inf. Where one part has keys, its partial and its lse come out unchanged, bit by bit, so an empty split costs no
    accuracy.

Roles: input, output. Traits: head_dim.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import Range, size_trait

MERGE_SIGNATURE = FormatSignature.of(input=FLOAT32, output=FLOAT32)

MERGE_PARTIALS = declare_operation(
    Operation(
        family="attention",
        mode="merge_partials",
        roles=MERGE_SIGNATURE.roles,
        traits={"head_dim": size_trait("elements of one head's output", 512)},
        arguments="partials [S, T, H, D], partial_lse [S, T, H], out [T, H, D], lse [T, H] or None",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_attention_merge_partials",
        family="attention",
        mode="merge_partials",
        solution="reference",
        signatures=frozenset({MERGE_SIGNATURE}),
        traits={"head_dim": Range(1)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_merge_partials(
    partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """The contract above by PyTorch."""
    most = partial_lse.amax(dim=0)
    empty = torch.isneginf(most)
    weights = torch.exp(partial_lse - torch.where(empty, 0.0, most))
    total = weights.sum(dim=0)
    used = torch.where((weights > 0.0).unsqueeze(-1), partials, 0.0)
    merged = (weights.unsqueeze(-1) * used).sum(dim=0) / torch.where(empty, 1.0, total).unsqueeze(-1)
    out.copy_(merged)
    if lse is not None:
        lse.copy_(torch.where(empty, -torch.inf, most + torch.log(total)))


def bind_merge_partials(*, head_dim: int, override: str | None = None) -> Bound:
    """Chooses ``fn(partials, partial_lse, out, lse)``."""
    return bind("attention", "merge_partials", MERGE_SIGNATURE, {"head_dim": head_dim}, override=override)
