"""Cases of norm.gated_rms."""

from collections.abc import Iterator

import torch

from tokenspeed_kernel.numerics.cases import (
    UNIT_ROUNDOFF,
    Buffers,
    Case,
    Close,
    Expectation,
    Outputs,
    register_cases,
)
from tokenspeed_kernel.numerics.elementwise_cases import exact_rms
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_FLOAT32 = torch.float32
_SMALLEST = 1e-35  # below this, float32 exponentials lose their relative precision


def _case(name: str, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, silu: bool) -> Case:
    rows, heads, width = x.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out, in_place = buffers.output("out", tuple(x.shape), _FLOAT32), buffers.writable("x in place", x)
        held, scale = buffers.read_only("x", x), buffers.read_only("weight", weight)
        # The gate lies among other columns, as the output of a joined linear has it.
        beside = torch.cat([torch.full((rows, 5), torch.nan), gate.flatten(1)], dim=1)
        part = buffers.read_only("gate", beside)[:, 5:].view(rows, heads, width)
        for start in range(0, max(1, rows), max(1, step)):
            span = slice(start, start + step)
            fn(held[span], part[span], scale, 1e-6, silu, out[span])
            fn(in_place[span], part[span], scale, 1e-6, silu, in_place[span])
        return {"out": out, "in place": in_place}

    def expect() -> dict[str, Expectation]:
        normed = exact_rms(x, weight, 1e-6)
        factor = torch.sigmoid(gate.double()) * (gate.double() if silu else 1.0)
        value = normed.value * factor
        bound = normed.bound * factor.abs() + 64.0 * UNIT_ROUNDOFF[_FLOAT32] * value.abs() + _SMALLEST
        return {"out": Close(value, bound), "in place": Close(value, bound)}

    traits = {"gate": "silu" if silu else "sigmoid"}
    return Case(name, traits, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def gated_rms_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Both gates; odd heads, no rows, a head of zeros, gates from -120 to 120."""
    for silu in (True, False):
        for rows, heads, width in ((0, 2, 64), (1, 1, 1), (3, 5, 67), (2, 32, 128), (7, 3, 16)):
            x, gate = (torch.randn(rows, heads, width, generator=generator) for _ in range(2))
            weight = torch.randn(width, generator=generator)
            yield _case(f"{rows} x {heads} x {width}", x, gate * 3.0, weight, silu)
        gate = torch.linspace(-120.0, 120.0, 480).reshape(2, 2, 120)
        x = torch.randn(2, 2, 120, generator=generator) * torch.tensor([0.0, 1.0]).view(1, 2, 1)
        yield _case("from -120 to 120", x, gate, torch.ones(120), silu)


register_cases("norm.gated_rms", gated_rms_cases)
