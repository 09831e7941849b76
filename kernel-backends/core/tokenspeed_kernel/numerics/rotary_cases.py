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
    lead: int = 0,
) -> Case:
    """x float32 [T, heads * (lead + D) + _SPARE]: before each head lie ``lead`` elements that belong to none."""
    rows, pitch = x.shape[0], (x.shape[1] - _SPARE) // heads
    width = pitch - lead
    rotary = table.shape[1]

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        held = buffers.writable("x", x)
        wide = held[:, : heads * pitch].view(rows, heads, pitch)
        view = wide[..., lead:]
        cos_sin = buffers.read_only("cos_sin", table)
        along = None if axes is None else buffers.read_only("axes", axes)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            place = buffers.read_only("positions", positions[:, part])
            fn(view[part], place, along, cos_sin, interleaved)
        spare = torch.cat([wide[..., :lead].flatten(1), held[:, -_SPARE:]], dim=1)
        return {"rotated": view[..., :rotary].clone(), "rest": view[..., rotary:].clone(), "spare": spare}

    def expect() -> dict[str, Expectation]:
        wide = x[:, : heads * pitch].reshape(rows, heads, pitch)
        whole, spare = wide[..., lead:], torch.cat([wide[..., :lead].flatten(1), x[:, -_SPARE:]], dim=1)
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
        return {"rotated": Close(value, bound), "rest": Exact(whole[..., rotary:]), "spare": Exact(spare)}

    traits = {"head_dim": width, "interleaved": interleaved, "axes": positions.shape[0]}
    return Case(name, traits, partial(run, step=rows), expect, split=partial(run, step=1))


def rotary_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Whole and partial heads, the ends of wider ones, halves and neighbours, one and three axes, a table that is
    scaled, no rows."""
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
    positions = torch.randint(0, 2000, (1, 6), generator=generator, dtype=torch.int32)
    x = torch.randn(6, 3 * 48 + _SPARE, generator=generator)
    yield _case("the ends of wider heads", 3, x, positions, None, rotary_table(10000.0, 16, 2000, yarn), True, 32)


register_cases("rotary.apply", rotary_cases)
