"""Routing, sorting by expert, grouped products, and the way back."""

from collections.abc import Callable
from typing import Any

import torch

from torch_npu.needs import FLOATS, need, need_dense, need_dtype


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [T, count]; the lower one where equal, which the documentation leaves open."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def gating_top_k_softmax_v2(
    x: torch.Tensor,
    *,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    need_dtype(FLOATS, x=x)
    need_dense(x=x)
    need(0 < k <= min(1024, x.shape[-1]), f"k is {k} of {x.shape[-1]}")
    need(finished is None and not output_softmax, "this stand-in computes every row and gives no softmax")
    scores = torch.softmax(x.float(), dim=-1)
    chosen = _best(x if renorm else scores, k)
    weights = torch.softmax(x.gather(1, chosen).float(), dim=-1) if renorm else scores.gather(1, chosen)
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).T.contiguous()
    return weights.to(x.dtype), chosen.int(), rows


def gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    need_dtype(FLOATS, x=x, bias=bias)
    experts, size = x.shape[-1], x.shape[-1] // group_count
    need(x.dim() == 2 and experts <= 2048, f"x is {list(x.shape)}")
    need(bias is None or bias.shape == (experts,), "bias has one value an expert")
    need(experts % group_count == 0 and size > 2, f"{group_count} groups of {experts} experts")
    need(-(-size // 32) * 32 * group_count <= 2048, "too many groups")
    need(1 <= k_group <= group_count and 1 <= k <= size * k_group, f"k {k}, k_group {k_group}")
    need(renorm == 0 and norm_type in (0, 1) and group_select_mode in (0, 1), "a mode that there is not")
    scores = torch.sigmoid(x.float()) if norm_type else torch.softmax(x.float(), dim=-1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        by_group = choice.view(-1, group_count, size)
        value = by_group.topk(2).values.sum(-1) if group_select_mode else by_group.amax(-1)
        kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, _best(value, k_group), True)
        choice = choice.masked_fill(~kept.repeat_interleave(size, dim=1), -torch.inf)
    chosen = _best(choice, k)
    # How y is scaled is not said for every mode; who uses it meets NaN.
    return torch.full(chosen.shape, torch.nan, dtype=x.dtype), chosen.int(), torch.empty(0)


def init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: tuple[int, int] = (0, 0),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    need_dtype((*FLOATS, torch.int8), x=x)
    need_dense(x=x, expert_idx=expert_idx)
    rows, top_k = expert_idx.shape
    need(expert_idx.dtype is torch.int32 and x.dim() == 2 and x.shape[0] == rows, "expert_idx is int32, a row a token")
    need(scale is None and offset is None and quant_mode == -1 and x_dtype is None, "this stand-in does not quantise")
    need(active_num in (-1, 0, rows * top_k) and drop_pad_mode == 0, "this stand-in drops nothing")
    need(
        expert_tokens_num_type == 1 and expert_tokens_num_flag and row_idx_type == 0,
        "this stand-in counts, and gathers",
    )
    start, stop = active_expert_range
    need(0 <= start < stop <= expert_num <= 10240, f"active experts {start} to {stop} of {expert_num}")
    need(bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()), "an expert id is out of range")
    flat = expert_idx.flatten().long()
    active = torch.nonzero((flat >= start) & (flat < stop)).squeeze(1)
    order = active[torch.argsort(flat[active], stable=True)]
    expanded = torch.full((rows * top_k, x.shape[1]), torch.nan, dtype=x.dtype)
    expanded[: order.shape[0]] = x[order // top_k]
    places = torch.full((rows * top_k,), -1, dtype=torch.int32)
    places[order] = torch.arange(order.shape[0], dtype=torch.int32)
    counts = torch.bincount(flat[active] - start, minlength=stop - start)
    return expanded, places, counts, torch.full((rows * top_k,), torch.nan)


def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: object,
) -> list[torch.Tensor]:
    need(all(value in (None, 0) for value in others.values()), f"this stand-in takes no {sorted(others)}")
    need(len(x) == len(weight) == 1, "this stand-in takes one x and one weight")
    rows, matrices = x[0], weight[0]
    need_dtype(FLOATS, x=rows, weight=matrices)
    need_dense(x=rows)
    need(rows.dim() == 2 and matrices.dim() == 3, f"x {list(rows.shape)}, weight {list(matrices.shape)}")
    need(matrices.is_contiguous() or matrices.transpose(1, 2).is_contiguous(), "weight is dense, or its transpose is")
    inner = matrices.shape[2] if matrices.is_contiguous() else matrices.shape[1]
    need(max(rows.shape[1], inner) < 65536, "the innermost axis is too wide")
    need(split_item in (2, 3) and group_type == 0 and group_list_type == 1, "counts along the rows, one output")
    assert group_list is not None
    need(group_list.dtype is torch.int64 and group_list.shape == matrices.shape[:1], "a count for each matrix, int64")
    need(group_list.shape[0] <= 1024 and bool((group_list >= 0).all()), "at most 1024 counts, none below 0")
    need(int(group_list.sum()) == rows.shape[0], f"the counts add up to {int(group_list.sum())}, not {rows.shape[0]}")
    parts = rows.split(group_list.tolist())
    return [torch.cat([(part.float() @ m.float()).to(rows.dtype) for part, m in zip(parts, matrices, strict=True)])]


def finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
) -> torch.Tensor:
    need(skip1 is None and skip2 is None and bias is None and drop_pad_mode == 0, "this stand-in only merges")
    assert scales is not None
    need_dtype(FLOATS, expanded_permuted_rows=expanded_permuted_rows, scales=scales)
    rows, top_k = scales.shape
    places = expanded_src_to_dst_row
    need(places.dtype is torch.int32 and places.shape == (rows * top_k,), "a place for each row and choice, int32")
    need(bool(((places >= 0) & (places < rows * top_k)).all()), "a place is out of range")
    found = torch.zeros(rows, expanded_permuted_rows.shape[1])
    for choice in range(top_k):
        part = expanded_permuted_rows[places[choice * rows : (choice + 1) * rows].long()]
        found += scales[:, choice : choice + 1].float() * part.float()
    return found.to(expanded_permuted_rows.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_moe_gating_top_k_softmax_v2": gating_top_k_softmax_v2,
    "npu_moe_gating_top_k": gating_top_k,
    "npu_moe_init_routing_v2": init_routing_v2,
    "npu_grouped_matmul": grouped_matmul,
    "npu_moe_finalize_routing": finalize_routing,
}
