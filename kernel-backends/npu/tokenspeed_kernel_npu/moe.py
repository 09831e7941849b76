"""moe.route and moe.experts; contracts in tokenspeed_kernel.ops.moe.

Experts: rows are sorted by expert, multiplied group by group in bfloat16, and brought back in float32.
"""

from collections.abc import Callable

import torch

from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import SUM_FLOOR, Routing
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_npu.elementwise import clipped
from tokenspeed_kernel_npu.operators import call

MOST_EXPERTS = 1024
"""Groups of one grouped product."""

MOST_ROUTED = 2048
"""Experts of npu_moe_gating_top_k, each group counted as a multiple of 32."""

Route = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def make_softmax_route(routing: Routing, correction: torch.Tensor | None) -> Route:
    """moe.route where experts are chosen by their logits: the operator chooses first and takes the softmax of what it
    chose, which are the weights that a renormalised softmax over all has."""
    assert correction is None, "the trait corrected is not admitted"

    def route(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if logits.shape[0] == 0:
            return
        found, chosen, _ = call("npu_moe_gating_top_k_softmax_v2", x=logits, k=routing.top_k, renorm=1)
        if not routing.renormalise:
            found = torch.softmax(logits, dim=-1).gather(1, chosen.long())
        ids.copy_(chosen)
        weights.copy_(found * routing.scale)

    return route


def _operator_takes(routing: Routing) -> bool:
    """Whether npu_moe_gating_top_k does: groups of more than 2, each counted as a multiple of 32 experts."""
    size = routing.experts // routing.groups
    return routing.groups == 1 or (size > 2 and -(-size // 32) * 32 * routing.groups <= MOST_ROUTED)


def _chosen_by_operator(logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    _, chosen, _ = call(
        "npu_moe_gating_top_k",
        x=logits,
        k=routing.top_k,
        bias=correction,
        k_group=routing.top_groups,
        group_count=routing.groups,
        group_select_mode=1,
        renorm=0,
        norm_type=1,
        routed_scaling_factor=1.0,
        eps=SUM_FLOOR,
    )
    ids: torch.Tensor = chosen
    return ids


def _chosen_by_sorting(logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """The same for groups that the operator does not take."""
    assert correction is not None, "the trait corrected is admitted only where True"
    choice = torch.sigmoid(logits) + correction
    by_group = choice.view(-1, routing.groups, routing.experts // routing.groups)
    groups = by_group.topk(2, dim=-1).values.sum(dim=-1).sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=logits.device)
    kept.scatter_(1, groups[:, : routing.top_groups], True)
    choice = by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).view_as(choice)
    return choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]


def make_sigmoid_route(routing: Routing, correction: torch.Tensor | None) -> Route:
    """moe.route with sigmoid scores and a correction, with or without groups: the operator chooses, the weights are
    taken of the scores here."""
    choose = _chosen_by_operator if _operator_takes(routing) else _chosen_by_sorting

    def route(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if logits.shape[0] == 0:
            return
        chosen = choose(logits, correction, routing)
        found = torch.sigmoid(logits).gather(1, chosen.long())
        if routing.renormalise:
            found = found / (found.sum(dim=-1, keepdim=True) + SUM_FLOOR)
        ids.copy_(chosen)
        weights.copy_(found * routing.scale)

    return route


def _product(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[R, N] bfloat16: the first counts[0] of ``rows`` [R, K] by weight[0] [K, N], and so on."""
    found: torch.Tensor = call(
        "npu_grouped_matmul",
        x=[rows],
        weight=[weight],
        group_list=counts,
        split_item=3,
        group_type=0,
        group_list_type=1,
    )[0]
    return found


def _activate(joined: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """Of the halves of ``joined`` float32 [R, 2I]."""
    if activation.kind == "silu":
        found: torch.Tensor = call("npu_swiglu", input=joined, dim=-1)
        return found
    if activation.kind == "clamped_swiglu":
        return clipped(joined, activation.alpha, activation.limit, 1.0)
    return clipped(joined, 1.0, activation.limit, 0.0)


def make_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Experts:
    """moe.experts of bfloat16 weights, read as they lie. Raises ValueError for more experts than one grouped product
    takes."""
    assert gate_up_bias is down_bias is None, "the trait biased is not admitted"
    hidden, intermediate = gate_up.shape[1], down.shape[1]
    experts = down.shape[0] // hidden
    if experts > MOST_EXPERTS:
        raise ValueError(
            f"{gate_up.source}: {experts} experts; npu_grouped_matmul takes {MOST_EXPERTS} groups. Share them out over "
            "more ranks (parallel.ep)"
        )
    inner = gate_up.plane.view(experts, 2 * intermediate, hidden).transpose(1, 2)
    outer = down.plane.view(experts, hidden, intermediate).transpose(1, 2)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        tokens, top_k = ids.shape
        if tokens == 0:
            return
        here = ids >= 0
        # An expert that is elsewhere is one more than there are, which the active range leaves out.
        sorted_rows, places, counts, _ = call(
            "npu_moe_init_routing_v2",
            x=x.to(torch.bfloat16),
            expert_idx=torch.where(here, ids, experts),
            active_num=tokens * top_k,
            expert_num=experts + 1,
            drop_pad_mode=0,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[0, experts],
            row_idx_type=0,
        )
        # The operator wants every row in a group: the last one takes those behind the active rows, which hold anything.
        active = counts.sum()
        counts = torch.cat([counts[:-1], counts[-1:] + tokens * top_k - active])
        middle = _activate(_product(sorted_rows, inner, counts).float(), activation).to(torch.bfloat16)
        found = _product(middle, outer, counts).float()
        behind = torch.arange(found.shape[0], device=found.device) >= active
        found = found.masked_fill(behind.unsqueeze(1), 0.0)
        by_choice = places.clamp(min=0).view(tokens, top_k).T.reshape(-1)
        merged = call(
            "npu_moe_finalize_routing",
            expanded_permuted_rows=found,
            skip1=None,
            skip2=None,
            bias=None,
            scales=torch.where(here, weights, 0.0),
            expanded_src_to_dst_row=by_choice,
            export_for_source_row=None,
            drop_pad_mode=0,
        )
        out.copy_(merged)

    return run
