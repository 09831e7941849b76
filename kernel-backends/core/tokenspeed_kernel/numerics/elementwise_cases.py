"""Cases of norm.rms, norm.fused_add_rms, activation.silu_and_mul and activation.clamped_swiglu."""

from collections.abc import Iterator

import torch

from tokenspeed_kernel.numerics.cases import (
    UNIT_ROUNDOFF,
    Buffers,
    Case,
    Close,
    Exact,
    Expectation,
    Outputs,
    register_cases,
)
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_SHAPES = ((0, 64), (1, 1), (1, 64), (3, 67), (5, 576), (33, 200))
_FLOAT32 = torch.float32
_SMALLEST = 1e-35  # below this, float32 exponentials lose their relative precision


def exact_rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Close:
    """RMS norm in float64, with the error that float32 may make."""
    wide = x.double()
    value = wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight.double()
    return Close(value, UNIT_ROUNDOFF[_FLOAT32] * (16.0 + x.shape[-1] ** 0.5) * value.abs() + _SMALLEST)


def _rms_case(name: str, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Case:
    def call(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out = buffers.output("out", tuple(x.shape), _FLOAT32)
        fn(buffers.read_only("x", x), buffers.read_only("weight", weight), eps, out)
        in_place = buffers.writable("x in place", x)
        fn(in_place, buffers.read_only("weight", weight), eps, in_place)
        return {"out": out, "in place": in_place}

    def split(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out, in_place = buffers.output("out", tuple(x.shape), _FLOAT32), buffers.writable("x", x)
        for row in range(x.shape[0]):
            fn(buffers.read_only("x", x[row : row + 1]), weight, eps, out[row : row + 1])
            fn(in_place[row : row + 1], weight, eps, in_place[row : row + 1])
        return {"out": out, "in place": in_place}

    def expect() -> dict[str, Expectation]:
        exact = exact_rms(x, weight, eps)
        return {"out": exact, "in place": exact}

    return Case(name, {}, call, expect, split=split)


def _fused_case(name: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Case:
    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        added, out = buffers.writable("residual", residual), buffers.output("out", tuple(x.shape), _FLOAT32)
        held, scale = buffers.read_only("x", x), buffers.read_only("weight", weight)
        for start in range(0, max(1, x.shape[0]), max(1, step)):
            rows = slice(start, start + step)
            fn(held[rows], added[rows], scale, eps, out[rows])
        return {"out": out, "residual": added}

    def expect() -> dict[str, Expectation]:
        total = x + residual
        return {"out": exact_rms(total, weight, eps), "residual": Exact(total)}

    return Case(name, {}, lambda fn, b: run(fn, b, x.shape[0]), expect, split=lambda fn, b: run(fn, b, 1))


def rms_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd widths, no rows, a row of zeros, very large and very small rows, out in place of x."""
    for rows, width in _SHAPES:
        x, weight = torch.randn(rows, width, generator=generator), torch.randn(width, generator=generator)
        yield _rms_case(f"{rows} x {width}", x, weight, 1e-5)
    x = torch.randn(4, 96, generator=generator) * torch.tensor([[0.0], [1e-6], [1e6], [1.0]])
    yield _rms_case("zeros, small and large", x, torch.randn(96, generator=generator), 1e-6)


def fused_add_rms_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The same shapes; the residual must hold the float32 sum, exactly."""
    for rows, width in _SHAPES:
        x, residual = (torch.randn(rows, width, generator=generator) for _ in range(2))
        yield _fused_case(f"{rows} x {width}", x, residual, torch.randn(width, generator=generator), 1e-5)


def _silu_case(name: str, gate: torch.Tensor, up: torch.Tensor, fused: bool) -> Case:
    rows, width = gate.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out = buffers.output("out", (rows, width), _FLOAT32)
        if fused:
            both = buffers.read_only("gate and up", torch.cat([gate, up], dim=1))
            held_gate, held_up = both[:, :width], both[:, width:]
        else:
            held_gate, held_up = buffers.read_only("gate", gate), buffers.read_only("up", up)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held_gate[part], held_up[part], out[part])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        wide = gate.double()
        value = wide / (1.0 + torch.exp(-wide)) * up.double()
        return {"out": Close(value, UNIT_ROUNDOFF[_FLOAT32] * 64.0 * value.abs() + _SMALLEST)}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def silu_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Separate tensors and halves of one buffer, odd widths, no rows, gates from -120 to 120."""
    for rows, width in _SHAPES:
        gate, up = (torch.randn(rows, width, generator=generator) for _ in range(2))
        yield _silu_case(f"{rows} x {width}", gate, up, fused=False)
        yield _silu_case(f"{rows} x {width} in one buffer", gate, up, fused=True)
    gate = torch.linspace(-120.0, 120.0, 482).reshape(2, 241)
    yield _silu_case("from -120 to 120", gate, torch.ones_like(gate), fused=False)


def _clamped_case(name: str, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> Case:
    rows, width = gate.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out = buffers.output("out", (rows, width), _FLOAT32)
        both = buffers.read_only("gate and up", torch.cat([gate, up], dim=1))
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(both[part, :width], both[part, width:], alpha, limit, out[part])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        wide, factor = gate.double().clamp(max=limit), up.double().clamp(-limit, limit) + 1.0
        gated = wide / (1.0 + torch.exp(-alpha * wide))
        # up + 1 is rounded where it nearly cancels, alpha * gate before its exponential is taken
        size = gated.abs() * (factor.abs() + 1.0) * (1.0 + alpha * wide.abs())
        return {"out": Close(gated * factor, UNIT_ROUNDOFF[_FLOAT32] * 64.0 * size + _SMALLEST)}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def clamped_swiglu_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd widths, no rows, most elements beyond the limit, gates from -120 to 120."""
    for rows, width in _SHAPES:
        gate, up = (torch.randn(rows, width, generator=generator) * 6.0 for _ in range(2))
        yield _clamped_case(f"{rows} x {width}", gate, up, 1.702, 7.0)
    gate = torch.linspace(-120.0, 120.0, 482).reshape(2, 241)
    yield _clamped_case("from -120 to 120", gate, gate.flip(0), 1.0, 50.0)


def _clamped_silu_case(name: str, gate: torch.Tensor, up: torch.Tensor, limit: float) -> Case:
    rows, width = gate.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out = buffers.output("out", (rows, width), _FLOAT32)
        both = buffers.read_only("gate and up", torch.cat([gate, up], dim=1))
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(both[part, :width], both[part, width:], limit, out[part])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        wide = gate.double().clamp(max=limit)
        value = wide / (1.0 + torch.exp(-wide)) * up.double().clamp(-limit, limit)
        return {"out": Close(value, UNIT_ROUNDOFF[_FLOAT32] * 64.0 * value.abs() + _SMALLEST)}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def clamped_silu_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd widths, no rows, many elements beyond the limit, gates from -120 to 120."""
    for rows, width in _SHAPES:
        gate, up = (torch.randn(rows, width, generator=generator) * 6.0 for _ in range(2))
        yield _clamped_silu_case(f"{rows} x {width}", gate, up, 7.0)
    gate = torch.linspace(-120.0, 120.0, 482).reshape(2, 241)
    yield _clamped_silu_case("from -120 to 120", gate, gate.flip(0), 50.0)


register_cases("norm.rms", rms_cases)
register_cases("norm.fused_add_rms", fused_add_rms_cases)
register_cases("activation.silu_and_mul", silu_cases)
register_cases("activation.clamped_swiglu", clamped_swiglu_cases)
register_cases("activation.clamped_silu", clamped_silu_cases)
