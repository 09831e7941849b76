"""Cases of activation.sigmoid_gate and activation.add."""

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


def _gate_case(name: str, x: torch.Tensor, gate: torch.Tensor) -> Case:
    rows, width = x.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out, in_place = buffers.output("out", (rows, width), _FLOAT32), buffers.writable("x in place", x)
        held = buffers.read_only("x", x)
        # The gate lies among other columns, as the output of a joined linear has it.
        beside = buffers.read_only("gate", torch.cat([torch.full((rows, 3), torch.nan), gate], dim=1))[:, 3:]
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held[part], beside[part], out[part])
            fn(in_place[part], beside[part], in_place[part])
        return {"out": out, "in place": in_place}

    def expect() -> dict[str, Expectation]:
        factor = torch.sigmoid(gate.double()).repeat_interleave(width // gate.shape[1], dim=1)
        value = x.double() * factor
        close = Close(value, UNIT_ROUNDOFF[_FLOAT32] * 64.0 * value.abs() + _SMALLEST)
        return {"out": close, "in place": close}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def gate_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """A gate an element, a part, a row; odd widths, no rows, gates from -120 to 120."""
    for rows, width, count in ((0, 64, 1), (1, 1, 1), (3, 67, 67), (5, 576, 1), (33, 192, 12), (4, 66, 2)):
        x, gate = torch.randn(rows, width, generator=generator), torch.randn(rows, count, generator=generator)
        yield _gate_case(f"{rows} x {width} by {count}", x, gate * 3.0)
    gate = torch.linspace(-120.0, 120.0, 482).reshape(2, 241)
    yield _gate_case("from -120 to 120", torch.randn(2, 241, generator=generator), gate)


def _add_case(name: str, x: torch.Tensor, before: torch.Tensor) -> Case:
    rows = x.shape[0]

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out, held = buffers.writable("out", before), buffers.read_only("x", x)
        for start in range(0, max(1, rows), max(1, step)):
            fn(held[start : start + step], out[start : start + step])
        return {"out": out}

    return Case(
        name, {}, lambda fn, b: run(fn, b, rows), lambda: {"out": Exact(before + x)}, split=lambda fn, b: run(fn, b, 1)
    )


def add_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd widths, no rows."""
    for rows, width in ((0, 64), (1, 1), (3, 67), (33, 200)):
        x, before = (torch.randn(rows, width, generator=generator) for _ in range(2))
        yield _add_case(f"{rows} x {width}", x, before)


register_cases("activation.sigmoid_gate", gate_cases)
register_cases("activation.add", add_cases)
