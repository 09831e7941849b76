"""norm.rms, norm.fused_add_rms, activation.silu_and_mul, clamped_swiglu, clamped_silu, gelu_tanh_and_mul and
scale_rows; contracts in tokenspeed_kernel.ops.norm, .activation, .gelu and .scaling."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import checked, expect, expect_range

_rms_norm = _native.rms_norm
_silu_and_mul = _native.silu_and_mul
_clamped_swiglu = _native.clamped_swiglu
_gelu_tanh_and_mul = _native.gelu_tanh_and_mul
_scale_rows = _native.scale_rows


def _check_rms(x: torch.Tensor, weight: torch.Tensor, _eps: float, out: torch.Tensor) -> None:
    expect("x", x, torch.float32, x.shape[:2])
    expect("weight", weight, torch.float32, x.shape[1:])
    expect("out", out, torch.float32, x.shape)


def _check_fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    _check_rms(x, weight, eps, out)
    expect("residual", residual, torch.float32, x.shape)


def _check_silu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    expect("gate", gate, torch.float32, out.shape, strided_rows=True)
    expect("up", up, torch.float32, out.shape, strided_rows=True)
    expect("out", out, torch.float32, out.shape)


def _check_clamped(gate: torch.Tensor, up: torch.Tensor, _alpha: float, _limit: float, out: torch.Tensor) -> None:
    _check_silu(gate, up, out)


def _check_scale(x: torch.Tensor, factors: torch.Tensor, places: torch.Tensor | None, out: torch.Tensor) -> None:
    expect("x", x, torch.float32, x.shape[:2])
    expect("out", out, torch.float32, x.shape)
    expect("factors", factors, torch.float32, factors.shape[:1])
    if places is not None:
        expect("places", places, torch.int32, x.shape[:1])
        expect_range("places", places, 0, factors.shape[0])


def _check_clamped_silu(gate: torch.Tensor, up: torch.Tensor, _limit: float, out: torch.Tensor) -> None:
    _check_silu(gate, up, out)


@checked(_check_rms)
def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x / rms(x) * weight."""
    _rms_norm(x.data_ptr(), 0, weight.data_ptr(), eps, out.data_ptr(), x.size(0), x.size(1))


@checked(_check_fused)
def fused_add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """residual += x, then out = residual / rms(residual) * weight."""
    _rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.size(0), x.size(1))


@checked(_check_silu)
def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """out = gate * sigmoid(gate) * up."""
    _silu_and_mul(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), out.size(0), out.size(1)
    )


@checked(_check_clamped)
def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> None:
    """out = g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit), u = up within [-limit, limit]."""
    _clamped_swiglu(
        gate.data_ptr(),
        gate.stride(0),
        up.data_ptr(),
        up.stride(0),
        alpha,
        limit,
        1.0,
        out.data_ptr(),
        out.size(0),
        out.size(1),
    )


@checked(_check_clamped_silu)
def clamped_silu(gate: torch.Tensor, up: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """out = g * sigmoid(g) * u with g = min(gate, limit), u = up within [-limit, limit]."""
    _clamped_swiglu(
        gate.data_ptr(),
        gate.stride(0),
        up.data_ptr(),
        up.stride(0),
        1.0,
        limit,
        0.0,
        out.data_ptr(),
        out.size(0),
        out.size(1),
    )


@checked(_check_silu)
def gelu_tanh_and_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """out = gelu(gate) * up, gelu by tanh."""
    _gelu_tanh_and_mul(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), out.size(0), out.size(1)
    )


@checked(_check_scale)
def scale_rows(x: torch.Tensor, factors: torch.Tensor, places: torch.Tensor | None, out: torch.Tensor) -> None:
    """out[t] = x[t] * factors[places[t]], or factors[0] where there are no places."""
    _scale_rows(
        x.data_ptr(),
        factors.data_ptr(),
        0 if places is None else places.data_ptr(),
        out.data_ptr(),
        x.size(0),
        x.size(1),
    )
