"""Cases of rotary.apply."""

from collections.abc import Iterator
from functools import partial

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
from tokenspeed_kernel.ops.rotary_tables import YarnScaling, mrope_axes, rotary_table
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_SPARE = 5  # elements of a row of the buffer that belong to no head


def _case(
    name: str,
    heads: int,
    x: torch.Tensor,
    positions: torch.Tensor,
    axes: torch.Tensor | None,
    table: torch.Tensor,
    interleaved: bool,
) -> Case:
    """x float32 [T, heads * D + _SPARE]."""
    rows, width = x.shape[0], (x.shape[1] - _SPARE) // heads
    rotary = table.shape[1]

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        held = buffers.writable("x", x)
        view = held[:, : heads * width].view(rows, heads, width)
        cos_sin = buffers.read_only("cos_sin", table)
        along = None if axes is None else buffers.read_only("axes", axes)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            place = buffers.read_only("positions", positions[:, part])
            fn(view[part], place, along, cos_sin, interleaved)
        return {"rotated": view[..., :rotary].clone(), "rest": view[..., rotary:].clone(), "spare": held[:, -_SPARE:]}

    def expect() -> dict[str, Expectation]:
        whole = x[:, : heads * width].reshape(rows, heads, width)
        pair = torch.arange(rotary // 2)
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
        follows = torch.zeros_like(pair) if axes is None else axes.long()
        angle = positions.long()[follows].T  # [T, R/2]
        turn = torch.complex(table[angle, pair].double(), table[angle, pair + rotary // 2].double()).unsqueeze(1)
        point = torch.complex(whole[..., first].double(), whole[..., second].double())
        result = torch.view_as_real(point * turn)
        value = torch.empty(rows, heads, rotary, dtype=torch.float64)
        value[..., first], value[..., second] = result[..., 0], result[..., 1]
        size = torch.empty_like(value)
        size[..., first] = size[..., second] = point.abs() * turn.abs()
        bound = 4.0 * UNIT_ROUNDOFF[torch.float32] * 2.0**0.5 * size
        return {"rotated": Close(value, bound), "rest": Exact(whole[..., rotary:]), "spare": Exact(x[:, -_SPARE:])}

    traits = {"head_dim": width, "interleaved": interleaved, "axes": positions.shape[0]}
    return Case(name, traits, partial(run, step=rows), expect, split=partial(run, step=1))


def rotary_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Whole and partial heads, halves and neighbours, one and three axes, a table that is scaled, no rows."""
    yarn = YarnScaling(factor=4.0, original_positions=512)
    for rows, heads, width, rotary, axes in (
        (5, 3, 64, 64, None),
        (0, 2, 16, 8, None),
        (9, 1, 80, 32, None),
        (33, 2, 6, 2, None),
        (7, 2, 128, 128, mrope_axes((16, 24, 24))),
        (7, 2, 128, 64, mrope_axes((12, 10, 10), interleaved=True)),
    ):
        count = 1 if axes is None else 3
        positions = torch.randint(0, 2000, (count, rows), generator=generator, dtype=torch.int32)
        x = torch.randn(rows, heads * width + _SPARE, generator=generator)
        table = rotary_table(10000.0, rotary, 2000, yarn)
        for interleaved in (False, True):
            kind = "neighbours" if interleaved else "halves"
            name = f"{rows} rows, {heads} heads of {width}, {rotary} rotated, {count} axes, {kind}"
            yield _case(name, heads, x, positions, axes, table, interleaved)


register_cases("rotary.apply", rotary_cases)
