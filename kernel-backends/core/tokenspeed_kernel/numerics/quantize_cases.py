"""Cases of quantize.rows and quantize.restore."""

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
from tokenspeed_kernel.ops.quantize import LARGEST
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature, TensorFormat

_ROUNDOFF = UNIT_ROUNDOFF[torch.float32]


def _described(quantised: TensorFormat, width: int) -> tuple[torch.dtype, tuple[int, int]]:
    """The dtype and the block (rows, columns) of a quantised format; the whole row where a token has one scale."""
    scale = quantised.scale
    assert scale is not None
    block = scale.block_shape or scale.dynamic_block_shape or (1, width)
    return getattr(torch, quantised.storage_dtype), (block[0], block[1])


def _half_step(quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half of the distance between the two values of ``dtype`` around each quotient, float64."""
    if dtype is torch.int8:
        return torch.full_like(quotient, 0.5)
    # e4m3: 3 bits behind the leading one, normal from 2^-6 on
    exponent = torch.floor(torch.log2(quotient.abs().clamp(min=2.0**-6)))
    return torch.exp2(exponent - 4.0)


def _rows_case(name: str, x: torch.Tensor, block: int, dtype: torch.dtype) -> Case:
    rows, width = x.shape
    count = -(-width // block)

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out = buffers.output("out", (rows, width), dtype)
        scales = buffers.output("scales", (rows, count), torch.float32)
        held = buffers.read_only("x", torch.nn.functional.pad(x, (0, 3)))[:, :width]
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held[part], block, out[part], scales[part])
        return {"out": out, "scales": scales}

    def expect() -> dict[str, Expectation]:
        wide = x.double()
        blocks = [wide[:, start : start + block] for start in range(0, width, block)]
        scale = torch.stack([part.abs().amax(dim=1) for part in blocks], dim=1) / LARGEST[dtype]
        spread = scale.repeat_interleave(block, dim=1)[:, :width]
        quotient = torch.where(spread == 0.0, 0.0, wide / spread)
        # the nearest value, and where rounding may carry the quotient over the middle, either of the two; never beyond
        slack = 8.0 * _ROUNDOFF * quotient.abs()
        bound = torch.where(quotient == 0.0, 0.0, _half_step(quotient, dtype) + slack)
        return {"out": Close(quotient, bound), "scales": Close(scale, 4.0 * _ROUNDOFF * scale)}

    return Case(name, {}, partial(run, step=rows), expect, split=partial(run, step=1))


def rows_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Whole and cut blocks, no rows, blocks of zeros, elements over many decades, the dtype's own values."""
    for rows, width in ((0, 64), (1, 1), (5, 128), (3, 200), (33, 257)):
        dtype, (_, block) = _described(signature["output"], width)
        x = torch.randn(rows, width, generator=generator)
        yield _rows_case(f"{rows} x {width}", x, block, dtype)
    dtype, (_, block) = _described(signature["output"], 256)
    x = torch.randn(4, 256, generator=generator) * torch.logspace(-6, 6, 256)
    x[1] = 0.0
    x[2, 128:] = 0.0
    yield _rows_case("zeros, and twelve decades", x, block, dtype)
    exact = torch.randint(-127, 128, (3, 256), generator=generator).float()
    exact[:, ::32] = LARGEST[dtype]
    yield _rows_case("integers under a scale of one", exact, block, dtype)


def _restore_case(name: str, q: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> Case:
    def call(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out = buffers.output("out", (q.shape[0], q.shape[1]), torch.float32)
        fn(buffers.read_only("q", q), buffers.read_only("scales", scales), block, out)
        return {"out": out}

    def split(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out = buffers.output("out", (q.shape[0], q.shape[1]), torch.float32)
        for start in range(0, q.shape[0], block[0]):  # whole blocks: a scale belongs to all its rows
            part, place = slice(start, start + block[0]), slice(start // block[0], start // block[0] + 1)
            fn(buffers.read_only("q", q[part]), buffers.read_only("scales", scales[place]), block, out[part])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        spread = scales.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
        # both factors are exact in float64 and so is their product: this rounds once, as a float32 product does
        return {"out": Exact((q.double() * spread[: q.shape[0], : q.shape[1]].double()).float())}

    return Case(name, {}, call, expect, split=split)


def restore_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Every value of the dtype, whole and cut blocks, no rows, scales of zero."""
    for rows, width in ((0, 64), (1, 256), (5, 200), (130, 300)):
        dtype, block = _described(signature["input"], width)
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
        values = values[values.float().abs() <= LARGEST[dtype]]
        picked = torch.randint(0, values.shape[0], (rows, width), generator=generator)
        picked[:1, : values.shape[0]] = torch.arange(values.shape[0])[:width]
        scales = torch.rand(-(-rows // block[0]), -(-width // block[1]), generator=generator) * 0.01
        scales[1:2] = 0.0
        yield _restore_case(f"{rows} x {width}", values.view(torch.uint8)[picked].view(dtype), scales, block)


register_cases("quantize.rows", rows_cases)
register_cases("quantize.restore", restore_cases)
