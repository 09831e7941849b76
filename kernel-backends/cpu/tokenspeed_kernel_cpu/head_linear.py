"""gemm.head_linear on weights where they lie; contract: tokenspeed_kernel.ops.gemm."""

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import Kernel, KernelArgumentError, checked, expect
from tokenspeed_kernel_cpu.threads import follow_torch


def _expect_heads(name: str, tensor: torch.Tensor, shape: tuple[int, int, int]) -> None:
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        raise KernelArgumentError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be float32 {list(shape)}")
    if tensor.numel():
        expect(f"a head of {name}", tensor[0, 0], torch.float32, shape[2:])


def make_head_linear(weight: QuantizedTensor, heads: int, skipped: int) -> Kernel:
    """``fn(x [T, heads, K], out [T, heads, N])``. Keeps the weight alive; holds no copy of it."""
    follow_torch()
    rows, columns = weight.shape
    multiply = _native.Matrix(weight.format, rows, columns, weight.plane.data_ptr(), 0).multiply_heads

    def check(x: torch.Tensor, out: torch.Tensor) -> None:
        _expect_heads("x", x, (x.shape[0], heads, columns))
        _expect_heads("out", out, (x.shape[0], heads, rows // heads - skipped))

    @checked(check)
    def head_linear(x: torch.Tensor, out: torch.Tensor, _alive: object = weight) -> None:
        multiply(
            heads,
            skipped,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            x.size(0),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
        )

    return head_linear
