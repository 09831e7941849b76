"""Workloads of mixtures of experts and of products with a matrix for each head: a row in decode, a chunk in prefill."""

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.standard_workloads import ROWS, weight_of, whole_blocks
from tokenspeed_kernel.workloads import Traits, Work, Workload, bits_of, register_workload

EXPERTS, TOP_K = 2, 2
"""Of the layer that is made where none is bound: there are many pairs of formats, and each is measured."""

HEADS = 16
GROUPS = 4

_FLOAT_BYTES = 4


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _layer(signature: FormatSignature, traits: Traits) -> dict[str, Any]:
    hidden = whole_blocks(signature["gate_up"], int(traits["hidden"]))
    inner = whole_blocks(signature["down"], int(traits["intermediate"]))
    silu = traits.get("activation", "silu") == "silu"
    biased = bool(traits.get("biased"))
    return {
        "gate_up": weight_of(signature["gate_up"], EXPERTS * 2 * inner, hidden),
        "down": weight_of(signature["down"], EXPERTS * hidden, inner),
        "gate_up_bias": _random(EXPERTS, 2 * inner) if biased else None,
        "down_bias": _random(EXPERTS, hidden) if biased else None,
        "activation": GatedActivation("silu") if silu else GatedActivation("clamped_swiglu", 1.702, 7.0),
    }


def _experts_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    """Each expert that has tokens is read once."""
    hidden, inner, rows = int(traits["hidden"]), int(traits["intermediate"]), ROWS[phase]
    touched = min(EXPERTS, rows * TOP_K)
    bits = 2 * bits_of(signature["gate_up"]) + bits_of(signature["down"])
    weight_bytes = int(touched * hidden * inner * bits / 8)
    return Work(weight_bytes + 2 * _FLOAT_BYTES * rows * hidden, 6 * rows * TOP_K * hidden * inner)


def _experts_workload(
    signature: FormatSignature, traits: Traits, phase: str, bound: Mapping[str, Any] | None
) -> Workload:
    """moe.experts on the bound layer, or on a random one; the tokens go to experts in turn."""
    values = _layer(signature, traits) if bound is None else bound
    hidden = values["gate_up"].shape[1]
    count, rows = values["down"].shape[0] // hidden, ROWS[phase]
    top = min(TOP_K, count)
    ids = ((torch.arange(rows).unsqueeze(1) * top + torch.arange(top)) % count).to(torch.int32)
    arguments = (_random(rows, hidden), ids, torch.full(ids.shape, 1.0 / top), torch.empty(rows, hidden))
    work = _experts_work(signature, traits, phase) if bound is None else None
    return Workload(f"{rows} rows, {top} of {count} experts each", arguments, values, work, cold=True)


def _route_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    elements = ROWS[phase] * int(traits["experts"])
    return Work(elements * _FLOAT_BYTES, 8 * elements)


def _route_workload(
    signature: FormatSignature, traits: Traits, phase: str, bound: Mapping[str, Any] | None
) -> Workload:
    """moe.route of a chunk of logits."""
    experts, rows = int(traits["experts"]), ROWS[phase]
    if bound is None:
        grouped = bool(traits.get("grouped")) and experts % GROUPS == 0
        groups = GROUPS if grouped else 1
        corrected = bool(traits.get("corrected")) and experts // groups > 1
        routing = Routing(
            experts=experts,
            top_k=min(int(traits["top_k"]), experts // groups),
            scoring=str(traits["scoring"]),
            corrected=corrected,
            groups=groups,
        )
        bound = {"routing": routing, "correction": _random(experts) if corrected else None}
    top_k = bound["routing"].top_k
    arguments = (_random(rows, experts), torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k))
    return Workload(f"{rows} rows of {experts} experts", arguments, bound, _route_work(signature, traits, phase))


def _head_linear_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    n, k, rows = int(traits["n"]), whole_blocks(signature["weight"], int(traits["k"])), ROWS[phase]
    weight_bytes = int(HEADS * n * k * bits_of(signature["weight"]) / 8)
    return Work(weight_bytes + _FLOAT_BYTES * rows * HEADS * (n + k), 2 * rows * HEADS * n * k)


def _head_linear_workload(
    signature: FormatSignature, traits: Traits, phase: str, bound: Mapping[str, Any] | None
) -> Workload:
    """gemm.head_linear on the bound weight, or on a random one of HEADS heads."""
    work = None
    if bound is None:
        n, k = int(traits["n"]), whole_blocks(signature["weight"], int(traits["k"]))
        bound = {"weight": weight_of(signature["weight"], HEADS * n, k), "heads": HEADS, "skipped": 0}
        work = _head_linear_work(signature, traits, phase)
    heads, (rows, k) = bound["heads"], bound["weight"].shape
    n = rows // heads - bound["skipped"]
    arguments = (_random(ROWS[phase], heads, k), torch.empty(ROWS[phase], heads, n))
    return Workload(f"[{ROWS[phase]}, {heads}, {k}] x [{heads} x {n}, {k}]", arguments, bound, work, cold=True)


register_workload("moe.experts", _experts_workload, _experts_work)
register_workload("moe.route", _route_workload, _route_work)
register_workload("gemm.head_linear", _head_linear_workload, _head_linear_work)
