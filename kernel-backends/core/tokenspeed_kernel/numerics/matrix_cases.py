"""Cases of gemm.linear, gemm.head_linear and embedding.lookup."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from tokenspeed_kernel.fp4_rows import FP4_GROUP
from tokenspeed_kernel.gguf_blocks import BLOCK_ELEMENTS, split_last
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
from tokenspeed_kernel.numerics.fp4_inputs import FP4_SUMS, fp4_inputs
from tokenspeed_kernel.numerics.weights import RandomWeight, random_weight
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FORMAT_NAMES = {tensor_format: name for name, tensor_format in WEIGHT_FORMATS.items()}

# name, T, N, K, with bias; K grows to whole blocks for blocked formats
_LINEAR_SHAPES = (
    ("one row", 1, 64, 64, False),
    ("no rows", 0, 16, 64, True),
    ("one output", 3, 1, 96, False),
    ("odd sizes", 5, 67, 131, True),
    ("a layer", 7, 192, 576, True),
    ("deep", 2, 33, 1536, False),
    ("many rows", 70, 48, 160, True),
    ("chunk of rows", 256, 80, 128, False),
)


def _whole_blocks(format_name: str, columns: int) -> int:
    """The least multiple of a block's elements that is not below ``columns``."""
    elements = BLOCK_ELEMENTS.get(format_name, 1)
    return (columns + elements - 1) // elements * elements


_LEVELS = {"int8": (127.0, 1e-4), "int16": (127.0 * 128.0, 1e-2)}
"""Activations to their largest quant, and how far from the middle of two float32 still may take either."""


def _quantised(x: torch.Tensor, activations: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x float64 [T, K], K a multiple of 32, as the ``activations`` take it; and by how much an element may be off: one
    step where it lies at the middle of two, as closely as float32 can tell."""
    levels, tolerance = _LEVELS[activations]
    blocks = split_last(x, -1, 32)
    step = blocks.abs().amax(dim=-1, keepdim=True) / levels
    ratio = torch.where(step > 0.0, blocks / step, 0.0)
    undecided = ((ratio - ratio.floor()) - 0.5).abs() < tolerance
    return (ratio.round() * step).flatten(1), (undecided * step).flatten(1)


def _linear_case(
    name: str, x: torch.Tensor, random: RandomWeight, bias: torch.Tensor | None, activations: str = "float32"
) -> Case:
    n, k = random.weight.shape
    rounding = {"bfloat16": UNIT_ROUNDOFF[torch.bfloat16], "fp4": FP4_SUMS}.get(activations, 0.0)

    def call(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out = buffers.output("out", (x.shape[0], n), torch.float32)
        fn(buffers.read_only("x", x), out)
        return {"out": out}

    def split(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out = buffers.output("out", (x.shape[0], n), torch.float32)
        held = buffers.read_only("x", x)
        step = 1 if x.shape[0] <= 16 else 23
        for start in range(0, x.shape[0], step):
            fn(held[start : start + step], out[start : start + step])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        taken, slack = x.double(), torch.zeros(1, k).double()
        if activations in _LEVELS:
            taken, slack = _quantised(taken, activations)
        elif activations == "fp4":
            taken, slack = fp4_inputs(taken, FP4_GROUP[random.weight.format])
        exact = taken @ random.values.T
        size = taken.abs() @ random.magnitude.T
        if bias is not None:
            exact, size = exact + bias.double(), size + bias.double().abs()
        bound = (rounding + UNIT_ROUNDOFF[torch.float32] * (k**0.5 + 8.0)) * size
        return {"out": Close(exact, bound + slack @ random.values.abs().T)}

    traits: dict[str, TraitValue] = {"n": n, "k": k, "activations": activations}
    return Case(name, traits, call, expect, {"weight": random.weight, "bias": bias}, split)


def linear_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd sizes, no rows, one row, one output, many rows; with and without a bias; and inputs of very different
    sizes. With bfloat16 weights all of it again for kernels that may round their inputs to bfloat16, with blocks for
    those too and for those that quantise them; with blocks of e2m1 also for those that quantise them so, and with rows
    that such have a rule of their own for."""
    format_name = _FORMAT_NAMES[signature["weight"]]
    roundings: tuple[str, ...] = ("bfloat16", *_LEVELS) if format_name in BLOCK_ELEMENTS else ()
    if format_name == "bfloat16":
        roundings = ("bfloat16",)
    elif format_name in FP4_GROUP:
        roundings += ("fp4",)
    for name, rows, n, k, with_bias in _LINEAR_SHAPES:
        k = _whole_blocks(format_name, k)
        random = random_weight(format_name, n, k, generator)
        bias = torch.randn(n, generator=generator) if with_bias else None
        x = torch.randn(rows, k, generator=generator)
        yield _linear_case(name, x, random, bias)
        for activations in roundings:
            yield _linear_case(f"{name}, rounded to {activations}", x, random, bias, activations)
    k = _whole_blocks(format_name, 128)
    random = random_weight(format_name, 24, k, generator)
    x = torch.randn(4, k, generator=generator) * torch.logspace(-12, 4, k)
    yield _linear_case("inputs over sixteen decades", x, random, None)
    for activations in roundings:
        yield _linear_case(f"inputs over sixteen decades, rounded to {activations}", x, random, None, activations)
    if format_name in FP4_GROUP:
        yield from _fp4_cases(format_name, generator)


def _fp4_cases(format_name: str, generator: torch.Generator) -> Iterator[Case]:
    """Zeros, ties between elements and between scales, blocks that vanish beside their neighbours, the largest floats
    and rows that are too small for a scale; and rows that are not finite, which say so."""
    random = random_weight(format_name, 40, 192, generator)
    x = torch.randn(9, 192, generator=generator)
    x[0] = 0.0
    x[1] = torch.randint(-28, 29, (192,), generator=generator) * 0.25
    x[2, :96] *= 1e-6
    x[3] *= 2.0**-101
    x[4] *= 2.0**-95
    x[5] *= 2.0**120
    x[6, ::16] = torch.linspace(3.0, 7.0, 12)
    x[7] = x[7].sign() * 2688.0
    x[8, 64:] = 0.0
    yield _linear_case("rows of every size, fp4", x, random, torch.randn(40, generator=generator), "fp4")
    x = torch.randn(3, 192, generator=generator)
    x[1, 70], x[2, 191] = torch.nan, -torch.inf
    case = _linear_case("rows that are not finite, fp4", x.nan_to_num(0.0, 0.0, 0.0), random, None, "fp4")

    def expect() -> dict[str, Expectation]:
        sound = case.expect()["out"]
        assert isinstance(sound, Close)
        value = sound.value.clone()
        value[1:] = torch.nan
        return {"out": Close(value, sound.bound)}

    spoilt = _linear_case(case.name, x, random, None, "fp4")
    yield replace(spoilt, expect=expect)


def _head_linear_case(name: str, x: torch.Tensor, spare: int, random: RandomWeight, skipped: int) -> Case:
    """x float32 [T, heads, K + spare], of which the first K are taken."""
    rows, heads = x.shape[:2]
    n, k = random.weight.shape[0] // heads - skipped, random.weight.shape[1]

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out = buffers.output("out", (rows, heads, n + spare), torch.float32)
        held = buffers.read_only("x", x)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held[part, :, :k], out[part, :, :n])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        values, sizes = (w.reshape(heads, -1, k)[:, skipped:] for w in (random.values, random.magnitude))
        exact, size = torch.full((2, rows, heads, n + spare), torch.nan, dtype=torch.float64)
        for head in range(heads):
            exact[:, head, :n] = x[:, head, :k].double() @ values[head].T
            size[:, head, :n] = x[:, head, :k].double().abs() @ sizes[head].T
        return {"out": Close(exact, UNIT_ROUNDOFF[torch.float32] * (k**0.5 + 8.0) * size)}

    bound = {"weight": random.weight, "heads": heads, "skipped": skipped}
    return Case(name, {"n": n, "k": k}, partial(run, step=rows), expect, bound, partial(run, step=1))


def head_linear_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The products of latent attention, odd sizes, no rows, heads that lie among other elements or rows."""
    format_name = _FORMAT_NAMES[signature["weight"]]
    for name, rows, heads, n, k, spare, skipped in (
        ("queries to latents", 3, 4, 64, 32, 16, 0),
        ("latents to values", 17, 3, 32, 96, 0, 48),
        ("no rows", 0, 2, 8, 32, 4, 0),
        ("odd sizes", 2, 5, 7, 37, 3, 2),
    ):
        k = k if format_name not in BLOCK_ELEMENTS else (k + 255) // 256 * 256
        random = random_weight(format_name, heads * (skipped + n), k, generator)
        x = torch.randn(rows, heads, k + spare, generator=generator)
        yield _head_linear_case(name, x, spare, random, skipped)


def _lookup_case(name: str, weight: QuantizedTensor, ids: torch.Tensor, rows: Callable[[], torch.Tensor]) -> Case:
    """``rows()``: float64 [T, H], what must come out, exactly."""

    def call(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out = buffers.output("out", (ids.shape[0], weight.shape[1]), torch.float32)
        fn(buffers.read_only("ids", ids), out)
        return {"out": out}

    def split(fn: KernelFunction, buffers: Buffers) -> Outputs:
        out = buffers.output("out", (ids.shape[0], weight.shape[1]), torch.float32)
        held = buffers.read_only("ids", ids)
        for row in range(ids.shape[0]):
            fn(held[row : row + 1], out[row : row + 1])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        return {"out": Exact(rows().float())}

    return Case(name, {}, call, expect, {"weight": weight}, split)


def _large_table() -> Case | None:
    """A bfloat16 table of more than 2^31 bytes, of which a few rows are touched; None where memory forbids it."""
    rows, width = (1 << 20) + 3, 1056
    if current_platform().memory_bytes < 4 * rows * width:
        return None
    try:
        table = torch.empty(rows, width, dtype=torch.bfloat16)
    except RuntimeError:
        return None
    ids = torch.tensor([rows - 1, 0, (1 << 20) - 1], dtype=torch.int32)
    expected = torch.arange(3 * width, dtype=torch.float64).reshape(3, width).bfloat16()
    table[ids.long()] = expected
    weight = QuantizedTensor.from_dense(table, "a table of more than 2^31 bytes")
    return _lookup_case("large offsets", weight, ids, expected.double)


def lookup_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """No ids, one, repeated, first and last; and, in bfloat16, byte offsets beyond 2^31."""
    format_name = _FORMAT_NAMES[signature["weight"]]
    for name, rows, width, ids in (
        ("no ids", 5, 64, []),
        ("one id", 5, 32, [3]),
        ("first, last and repeated", 211, 96, [210, 0, 7, 7, 7, 210, 100]),
        ("wide", 40, 576, list(range(39, -1, -1))),
    ):
        random = random_weight(format_name, rows, _whole_blocks(format_name, width), generator)
        index = torch.tensor(ids, dtype=torch.int32)
        yield _lookup_case(name, random.weight, index, partial(random.values.index_select, 0, index))
    if format_name == "bfloat16":
        large = _large_table()
        if large is not None:
            yield large


register_cases("gemm.linear", linear_cases)
register_cases("gemm.head_linear", head_linear_cases)
register_cases("embedding.lookup", lookup_cases)
