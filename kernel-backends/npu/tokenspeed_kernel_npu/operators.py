"""torch_npu's operators: which of them are called, with which arguments, and the call.

``operator_schemas.json`` holds their schemas as the library of one torch_npu has them, written by
``scripts/npu_schemas.py``. Every call names all its arguments, so a torch_npu that has them all serves, and one that
does not is refused by name.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

SCHEMAS = Path(__file__).with_name("operator_schemas.json")

CALLS: dict[str, tuple[str, ...]] = {
    "npu_add_rms_norm": ("x1", "x2", "gamma", "epsilon"),
    "npu_clipped_swiglu": ("x", "dim", "alpha", "limit", "bias", "interleaved"),
    "npu_fused_infer_attention_score_v2": (
        "query",
        "key",
        "value",
        "query_rope",
        "key_rope",
        "atten_mask",
        "actual_seq_qlen",
        "actual_seq_kvlen",
        "block_table",
        "num_query_heads",
        "num_key_value_heads",
        "softmax_scale",
        "pre_tokens",
        "next_tokens",
        "input_layout",
        "sparse_mode",
        "block_size",
        "return_softmax_lse",
    ),
    "npu_grouped_matmul": ("x", "weight", "group_list", "split_item", "group_type", "group_list_type"),
    "npu_moe_finalize_routing": (
        "expanded_permuted_rows",
        "skip1",
        "skip2",
        "bias",
        "scales",
        "expanded_src_to_dst_row",
        "export_for_source_row",
        "drop_pad_mode",
    ),
    "npu_moe_gating_top_k": (
        "x",
        "k",
        "bias",
        "k_group",
        "group_count",
        "group_select_mode",
        "renorm",
        "norm_type",
        "routed_scaling_factor",
        "eps",
    ),
    "npu_moe_gating_top_k_softmax_v2": ("x", "k", "renorm"),
    "npu_moe_init_routing_v2": (
        "x",
        "expert_idx",
        "active_num",
        "expert_num",
        "drop_pad_mode",
        "expert_tokens_num_type",
        "expert_tokens_num_flag",
        "quant_mode",
        "active_expert_range",
        "row_idx_type",
    ),
    "npu_rms_norm": ("input", "gamma", "epsilon"),
    "npu_rotary_mul": ("input", "r1", "r2", "rotary_mode"),
    "npu_scatter_nd_update_": ("input", "indices", "updates"),
    "npu_swiglu": ("input", "dim"),
}
"""Operator to the arguments that are passed to it."""

ATEN = ("mm.dtype",)
"""Operators of torch itself that not every torch_npu has a kernel for."""


def call(operator: str, **arguments: Any) -> Any:
    """Calls an operator of CALLS; whatever torch_npu raises goes on to the caller."""
    return getattr(torch.ops.npu, operator).default(**arguments)


@cache
def _absence() -> str | None:
    """Why torch_npu cannot be imported, None where it can; it is, here, for that is what adds its operators."""
    if find_spec("torch_npu") is None:
        return "needs the package torch-npu, which is not installed"
    try:
        import_module("torch_npu")
    except Exception as error:  # CANN or the driver absent, another torch: each with an error of its own kind
        return f"torch_npu cannot be imported ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    return None


def _lack(operator: str) -> str | None:
    if operator.startswith("aten::"):
        there = torch._C._dispatch_has_kernel_for_dispatch_key(operator, "PrivateUse1")
        return None if there else f"this torch_npu has no kernel for {operator}"
    if not hasattr(torch.ops.npu, operator):
        return f"this torch_npu has no {operator}"
    found = {argument.name for argument in getattr(torch.ops.npu, operator).default._schema.arguments}
    missing = sorted(set(CALLS[operator]) - found)
    return f"{operator} of this torch_npu takes no {', '.join(missing)}" if missing else None


def lacking(operators: Iterable[str]) -> str | None:
    """What keeps these operators from being called, with the version that they were written for; None for nothing.
    Imports torch_npu."""
    absence = _absence()
    if absence is not None:
        return absence
    reasons = [reason for reason in map(_lack, sorted(operators)) if reason is not None]
    return f"{reasons[0]}; the calls are those of torch-npu {recorded()['torch_npu']}" if reasons else None


@cache
def recorded() -> dict[str, Any]:
    """The contract: "torch_npu" (its version), "wheel_sha256", "schemas" (operator to schema) and "aten" (the operators
    of torch that it has kernels for, of those that are called)."""
    contract: dict[str, Any] = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    return contract
