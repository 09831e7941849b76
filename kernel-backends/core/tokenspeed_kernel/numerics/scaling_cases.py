"""Cases of activation.gelu_tanh_and_mul and activation.scale_rows."""

import math
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

_FLOAT32 = torch.float32
_SMALLEST = 1e-35  # below this, float32 exponentials lose their relative precision


def _gelu_case(name: str, gate: torch.Tensor, up: torch.Tensor, fused: bool) -> Case:
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
        inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)
        # 1 + tanh(a) is 2 / (1 + exp(-2a)), which does not cancel
        value = wide / (1.0 + torch.exp(-2.0 * inner)) * up.double()
        # the argument of the exponential is rounded, and so is what it makes of it
        return {"out": Close(value, UNIT_ROUNDOFF[_FLOAT32] * 64.0 * value.abs() * (1.0 + inner.abs()) + _SMALLEST)}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def gelu_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Separate tensors and halves of one buffer, odd widths, no rows, gates from -40 to 40: there the exponential
    overflows and vanishes."""
    for rows, width in ((0, 64), (1, 1), (3, 67), (5, 576), (33, 200)):
        gate, up = (torch.randn(rows, width, generator=generator) * 2.0 for _ in range(2))
        yield _gelu_case(f"{rows} x {width}", gate, up, fused=False)
        yield _gelu_case(f"{rows} x {width} in one buffer", gate, up, fused=True)
    gate = torch.linspace(-40.0, 40.0, 482).reshape(2, 241)
    yield _gelu_case("from -40 to 40", gate, torch.ones_like(gate), fused=False)


def _scale_case(name: str, x: torch.Tensor, factors: torch.Tensor, places: torch.Tensor | None) -> Case:
    rows = x.shape[0]

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out, in_place = buffers.output("out", tuple(x.shape), _FLOAT32), buffers.writable("x in place", x)
        held, scale = buffers.read_only("x", x), buffers.read_only("factors", factors)
        rows_of = None if places is None else buffers.read_only("places", places)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            here = None if rows_of is None else rows_of[part]
            fn(held[part], scale, here, out[part])
            fn(in_place[part], scale, here, in_place[part])
        return {"out": out, "in place": in_place}

    def expect() -> dict[str, Expectation]:
        each = [factors[0 if places is None else int(places[row])].item() for row in range(rows)]
        exact = Exact((x.double() * torch.tensor(each, dtype=torch.float64).view(rows, 1)).float())
        return {"out": exact, "in place": exact}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def scale_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """One factor, and one of several for each row; odd widths, no rows."""
    for rows, width in ((0, 64), (1, 1), (3, 67), (33, 200)):
        x, factors = torch.randn(rows, width, generator=generator), torch.randn(9, generator=generator)
        yield _scale_case(f"{rows} x {width} by one", x, factors[:1], None)
        places = torch.randint(0, 9, (rows,), generator=generator, dtype=torch.int32)
        yield _scale_case(f"{rows} x {width} by places", x, factors, places)


register_cases("activation.gelu_tanh_and_mul", gelu_cases)
register_cases("activation.scale_rows", scale_cases)
