"""norm.rms, norm.fused_add_rms, norm.gated_rms and the activations on the device; contracts in tokenspeed_kernel.ops.

Each row is computed by programs of its own, so its bits depend on no other row.
"""

from functools import partial

import torch

from tokenspeed_kernel_triton.loading import Launch

STRETCH = 1024
"""Elements of a row that one program of an activation takes."""

MAX_WIDTH = 65536
"""Of a row that a norm holds in registers."""


def _stretches(rows: int, width: int) -> tuple[int, int]:
    return rows, -(-width // STRETCH)


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    if x.shape[0]:
        norm_of(x, residual, weight, eps, out).run()


def norm_of(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> Launch:
    """The launch of a norm; raises ValueError for rows that are too wide to hold."""
    rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} elements are too wide for this norm; at most {MAX_WIDTH}")
    block = 1 << (width - 1).bit_length()
    constants = {"WIDTH": width, "BLOCK": block, "ADDED": residual is not None}
    arguments = (x, x if residual is None else residual, weight, out, float(eps))
    return Launch("elementwise", "rms", (rows,), arguments, constants, warps=max(1, min(16, block // 512)))


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """norm.rms."""
    _norm(x, None, weight, eps, out)


def fused_add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """norm.fused_add_rms."""
    _norm(x, residual, weight, eps, out)


def gated_rms_of(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, silu: bool, out: torch.Tensor
) -> Launch:
    """The launch of a norm of heads under a gate."""
    rows, heads, width = x.shape
    block = 1 << (width - 1).bit_length()
    share = max(1, min(STRETCH // block, 1 << (heads - 1).bit_length()))
    constants = {"WIDTH": width, "SILU": silu, "BLOCK_H": share, "BLOCK": block}
    arguments = (x, gate, weight, out, gate.stride(0), heads, float(eps))
    return Launch("elementwise", "gated_rms", (rows, -(-heads // share)), arguments, constants)


def gated_rms(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, silu: bool, out: torch.Tensor
) -> None:
    """norm.gated_rms."""
    if x.numel():
        gated_rms_of(x, gate, weight, eps, silu, out).run()


def gated_of(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, kind: str, alpha: float = 0.0, limit: float = 0.0
) -> Launch:
    """The launch of out = activation(gate) * up."""
    rows, width = out.shape
    arguments = (gate, up, out, gate.stride(0), up.stride(0), width, float(alpha), float(limit))
    return Launch("elementwise", "gated", _stretches(rows, width), arguments, {"KIND": kind, "BLOCK": STRETCH})


def _gated(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, *, kind: str) -> None:
    if out.numel():
        gated_of(gate, up, out, kind).run()


silu_and_mul = partial(_gated, kind="silu")
gelu_tanh_and_mul = partial(_gated, kind="gelu_tanh")


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> None:
    """activation.clamped_swiglu."""
    if out.numel():
        gated_of(gate, up, out, "clamped_swiglu", alpha, limit).run()


def clamped_silu(gate: torch.Tensor, up: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """activation.clamped_silu."""
    if out.numel():
        gated_of(gate, up, out, "clamped_silu", 0.0, limit).run()


def sigmoid_gate_of(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch of out = x * sigmoid(gate)."""
    rows, width = x.shape
    arguments = (x, gate, out, gate.stride(0), width, width // gate.shape[1])
    return Launch("elementwise", "sigmoid_gate", _stretches(rows, width), arguments, {"BLOCK": STRETCH})


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """activation.sigmoid_gate."""
    if x.numel():
        sigmoid_gate_of(x, gate, out).run()


def add_of(x: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch of out += x."""
    rows, width = x.shape
    return Launch("elementwise", "add", _stretches(rows, width), (x, out, width), {"BLOCK": STRETCH})


def add(x: torch.Tensor, out: torch.Tensor) -> None:
    """activation.add."""
    if x.numel():
        add_of(x, out).run()


def scale_rows_of(x: torch.Tensor, factors: torch.Tensor, places: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """The launch of rows times their factors."""
    rows, width = x.shape
    arguments = (x, factors, factors if places is None else places, out, width)
    constants = {"PLACED": places is not None, "BLOCK": STRETCH}
    return Launch("elementwise", "scale_rows", _stretches(rows, width), arguments, constants)


def scale_rows(x: torch.Tensor, factors: torch.Tensor, places: torch.Tensor | None, out: torch.Tensor) -> None:
    """activation.scale_rows."""
    if x.numel():
        scale_rows_of(x, factors, places, out).run()
