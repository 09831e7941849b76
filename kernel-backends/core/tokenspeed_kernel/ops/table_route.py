"""moe.table_route: experts that are looked up by the token's id, as the first layers of DeepSeek-V4 have it.

Contract
    ``fn(logits, tokens, table, scale, ids, weights) -> None``
    logits float32 [T, E], contiguous, left alone; tokens int32 [T]; table int32 [V, k], each row k experts; ids int32
    [T, k] and weights float32 [T, k], contiguous; scale a Python float. T may be 0.
    ids = table[tokens]; score = sqrt(log(1 + exp(logit))) as in moe.route's "sqrtsoftplus"; weight = score of the
    expert, divided by (the sum of the row's + 1e-20), times scale.

Roles: logits, output. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.moe import ROUTE_SIGNATURE, SUM_FLOOR, score_of
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel

TABLE_ROUTE = declare_operation(
    Operation(
        family="moe",
        mode="table_route",
        roles=ROUTE_SIGNATURE.roles,
        arguments="logits [T, E], tokens int32 [T], table int32 [V, k], scale, ids int32 [T, k], weights [T, k]",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_moe_table_route",
        family="moe",
        mode="table_route",
        solution="reference",
        signatures=frozenset({ROUTE_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_table_route(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """moe.table_route by PyTorch."""
    torch.index_select(table, 0, tokens, out=ids)
    found = score_of("sqrtsoftplus", logits).gather(1, ids.long())
    weights.copy_(found / (found.sum(dim=1, keepdim=True) + SUM_FLOOR) * scale)


def bind_table_route(*, override: str | None = None) -> Bound:
    """Chooses ``fn(logits, tokens, table, scale, ids, weights)``."""
    return bind("moe", "table_route", ROUTE_SIGNATURE, {}, override=override)
