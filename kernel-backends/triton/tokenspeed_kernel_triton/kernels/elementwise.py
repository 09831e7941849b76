"""Norms and activations: one program a row, or a stretch of one; arithmetic in float32."""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)); the exponential of a number below 0 cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as accurate as exp(-|x|) is."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    logarithm = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.maximum(x, 0.0) + logarithm


@triton.jit
def rms(x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    """out = rms(x) * weight; with ADDED of residual + x, which becomes the residual. Rows of WIDTH elements, dense.

    A row is held whole: out may be x.
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, BLOCK)
    here = place < WIDTH
    value = tl.load(x + row + place, mask=here, other=0.0)
    if ADDED:
        value += tl.load(residual + row + place, mask=here, other=0.0)
        tl.store(residual + row + place, value, mask=here)
    # rsqrt is an approximation on GPUs, the root and the quotient are not
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(out + row + place, value * factor * tl.load(weight + place, mask=here, other=0.0), mask=here)


@triton.jit(do_not_specialize=["heads"])
def gated_rms(
    x, gate, weight, out, gate_stride, heads, eps,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = rms(x) * weight * f(gate), head by head of WIDTH elements. Grid: (rows, groups of BLOCK_H heads).

    Heads are held whole: out may be x.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    place = tl.arange(0, BLOCK)
    here = (head < heads)[:, None] & (place < WIDTH)[None, :]
    at = head[:, None] * WIDTH + place[None, :]
    value = tl.load(x + row * heads * WIDTH + at, mask=here, other=0.0)
    g = tl.load(gate + row * gate_stride + at, mask=here, other=0.0)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 1) / WIDTH + eps)
    scale = tl.load(weight + place, mask=place < WIDTH, other=0.0)
    opened = _sigmoid(g) * g if SILU else _sigmoid(g)
    tl.store(out + row * heads * WIDTH + at, value * factor[:, None] * scale[None, :] * opened, mask=here)


@triton.jit
def gate_and_multiply(g, u, alpha, limit, KIND: tl.constexpr):
    """activation(g) * u, KIND as in tokenspeed_kernel.ops.activation. A NaN stays one."""
    if KIND == "silu":
        return g * _sigmoid(g) * u
    if KIND == "gelu_tanh":
        return g * _sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
    g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
    u = tl.maximum(tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL), -limit, propagate_nan=tl.PropagateNan.ALL)
    return g * _sigmoid(alpha * g) * (u + 1.0) if KIND == "clamped_swiglu" else g * _sigmoid(g) * u


@triton.jit(do_not_specialize=["width"])
def gated(gate, up, out, gate_stride, up_stride, width, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out = activation(gate) * up, KIND as in tokenspeed_kernel.ops.activation. Grid: (rows, stretches of BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    g = tl.load(gate + row * gate_stride + place, mask=here, other=0.0)
    u = tl.load(up + row * up_stride + place, mask=here, other=0.0)
    tl.store(out + row * width + place, gate_and_multiply(g, u, alpha, limit, KIND), mask=here)


@triton.jit(do_not_specialize=["width", "share"])
def sigmoid_gate(x, gate, out, gate_stride, width, share, BLOCK: tl.constexpr):
    """out = x * sigmoid(gate), ``share`` neighbours under one gate. Grid: (rows, stretches of BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    g = tl.load(gate + row * gate_stride + place // share, mask=here, other=0.0)
    value = tl.load(x + row * width + place, mask=here, other=0.0)
    tl.store(out + row * width + place, value * _sigmoid(g), mask=here)


@triton.jit(do_not_specialize=["width"])
def add(x, out, width, BLOCK: tl.constexpr):
    """out += x. Grid: (rows, stretches of BLOCK)."""
    at = tl.program_id(0).to(tl.int64) * width
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    value = tl.load(out + at + place, mask=here, other=0.0) + tl.load(x + at + place, mask=here, other=0.0)
    tl.store(out + at + place, value, mask=here)


@triton.jit(do_not_specialize=["width"])
def scale_rows(x, factors, places, out, width, PLACED: tl.constexpr, BLOCK: tl.constexpr):
    """out = x times factors[places[row]], or factors[0]. Grid: (rows, stretches of BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + (tl.load(places + row) if PLACED else 0))
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    tl.store(out + row * width + place, tl.load(x + row * width + place, mask=here, other=0.0) * factor, mask=here)
