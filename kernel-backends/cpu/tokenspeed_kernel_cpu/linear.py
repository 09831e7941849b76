"""gemm.linear and embedding.lookup on weights where they lie; contracts: tokenspeed_kernel.ops.gemm and .embedding."""

from collections.abc import Callable

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import Kernel, checked, expect, expect_range
from tokenspeed_kernel_cpu.threads import follow_torch


def _matrix(weight: QuantizedTensor, bias: torch.Tensor | None) -> _native.Matrix:
    """The native view of the weight. Who holds it must hold the weight and the bias too."""
    follow_torch()
    rows, columns = weight.shape
    return _native.Matrix(weight.format, rows, columns, weight.plane.data_ptr(), 0 if bias is None else bias.data_ptr())


def make_linear(weight: QuantizedTensor, bias: torch.Tensor | None) -> Kernel:
    """``fn(x [T, K], out [T, N])``. Keeps the weight alive; holds no copy of it."""
    dense_bias = None if bias is None else bias.contiguous()
    return product(_matrix(weight, dense_bias).multiply, weight.shape, (weight, dense_bias))


def make_rounded_linear(weight: QuantizedTensor, bias: torch.Tensor | None) -> Kernel:
    """``fn(x [T, K], out [T, N])`` with x rounded to bfloat16 in the call; bfloat16 weights, on the instruction set
    avx512_bf16 only. Keeps the weight alive; holds no copy of it.

    A call raises RuntimeError where another instruction set was put in force meanwhile.
    """
    dense_bias = None if bias is None else bias.contiguous()
    return product(_matrix(weight, dense_bias).multiply_rounded, weight.shape, (weight, dense_bias))


def make_tiled_linear(weight: QuantizedTensor, bias: torch.Tensor | None, *, emulated: bool = False) -> Kernel:
    """As make_rounded_linear, by AMX's tiles. It has not run on hardware; ``emulated`` does the same in plain C++, for
    tests.

    A call raises RuntimeError where AMX was not enabled (amx.py) or another instruction set was put in force meanwhile.
    """
    dense_bias = None if bias is None else bias.contiguous()
    multiply_tiled = _matrix(weight, dense_bias).multiply_tiled

    def multiply(x: int, tokens: int, out: int) -> None:
        multiply_tiled(x, tokens, out, emulated)

    return product(multiply, weight.shape, (weight, dense_bias))


def product(multiply: Callable[[int, int, int], None], shape: tuple[int, int], alive: object) -> Kernel:
    """``fn(x [T, K], out [T, N])`` of a native ``multiply`` for a weight of ``shape`` (N, K); keeps ``alive`` alive."""
    rows, columns = shape

    def check(x: torch.Tensor, out: torch.Tensor) -> None:
        expect("x", x, torch.float32, (x.shape[0], columns))
        expect("out", out, torch.float32, (x.shape[0], rows))

    @checked(check)
    def linear(x: torch.Tensor, out: torch.Tensor, _alive: object = alive) -> None:
        multiply(x.data_ptr(), x.size(0), out.data_ptr())

    return linear


def make_lookup(weight: QuantizedTensor) -> Kernel:
    """``fn(ids int32 [T], out [T, H])``. Keeps the weight alive; holds no copy of it."""
    look_up = _matrix(weight, None).lookup
    rows, columns = weight.shape

    def check(ids: torch.Tensor, out: torch.Tensor) -> None:
        expect("ids", ids, torch.int32, (ids.shape[0],))
        expect("out", out, torch.float32, (ids.shape[0], columns))
        expect_range("ids", ids, 0, rows)

    @checked(check)
    def lookup(ids: torch.Tensor, out: torch.Tensor, _alive: object = weight) -> None:
        look_up(ids.data_ptr(), ids.size(0), out.data_ptr())

    return lookup
