"""gemm.linear with quantised activations, on weights packed at binding; contract: tokenspeed_kernel.ops.gemm."""

from dataclasses import dataclass

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import Kernel
from tokenspeed_kernel_cpu.linear import product
from tokenspeed_kernel_cpu.threads import follow_torch

FORMATS = (
    "gguf_q4_0",
    "gguf_q4_1",
    "gguf_q5_0",
    "gguf_q5_1",
    "gguf_q8_0",
    "gguf_q4_k",
    "gguf_q5_k",
    "gguf_q6_k",
)
"""The weight formats that are packed (src/panels.hpp says how)."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [N, K] in panels.

    Attributes:
        matrix: what owns them; ``matrix.nbytes`` is about what the blocks took.
        shape: (N, K).
    """

    matrix: _native.PackedMatrix
    shape: tuple[int, int]


def pack(weight: QuantizedTensor) -> PackedWeight:
    """The weight in memory of its own, the same values in another order; the pre-processor of these kernels.

    Where the weight lies in a file that is mapped shared, the resident pages of the map are given back, so that one
    copy stays in memory; who reads them again, an embedding of the same table, gets them from the file.
    """
    follow_torch()
    rows, columns = weight.shape
    matrix = _native.PackedMatrix(weight.format, rows, columns, weight.plane.data_ptr())
    _native.release_mapped(weight.plane.data_ptr(), weight.nbytes)
    return PackedWeight(matrix, weight.shape)


def make_int8_linear(weight: PackedWeight, bias: torch.Tensor | None) -> Kernel:
    """``fn(x [T, K], out [T, N])`` with x in 8 bits."""
    return _product(weight, bias, wide=False)


def make_int16_linear(weight: PackedWeight, bias: torch.Tensor | None) -> Kernel:
    """``fn(x [T, K], out [T, N])`` with x in 15 bits: two products of 8 bits."""
    return _product(weight, bias, wide=True)


def _product(weight: PackedWeight, bias: torch.Tensor | None, *, wide: bool) -> Kernel:
    dense_bias = None if bias is None else bias.contiguous()
    bias_address = 0 if dense_bias is None else dense_bias.data_ptr()
    multiply_packed = weight.matrix.multiply

    def multiply(x: int, tokens: int, out: int) -> None:
        multiply_packed(x, tokens, out, bias_address, wide)

    return product(multiply, weight.shape, (weight, dense_bias))
