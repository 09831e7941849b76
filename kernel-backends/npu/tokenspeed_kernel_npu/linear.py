"""gemm.linear with bfloat16 weights, x rounded to bfloat16; contract in tokenspeed_kernel.ops.gemm.

The product is torch's own with a float32 result, ``aten::mm.dtype``: a result in bfloat16 would be rounded once more
than the contract allows.
"""

from collections.abc import Callable

import torch

from tokenspeed_kernel.quantized import QuantizedTensor


def make_linear(weight: QuantizedTensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear."""
    matrix = weight.plane

    def linear(x: torch.Tensor, out: torch.Tensor) -> None:
        if x.shape[0] == 0:
            return
        out.copy_(torch.ops.aten.mm.dtype(x.to(torch.bfloat16), matrix.T, torch.float32))
        if bias is not None:
            out += bias

    return linear
