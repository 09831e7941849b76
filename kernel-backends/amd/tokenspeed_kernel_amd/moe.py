"""moe.experts over bfloat16 by AITER's fused mixture; contract in tokenspeed_kernel.ops.moe.

Its matrix instructions read a weight tile by tile: the rows are laid out for them once, when they are bound, in place
of the order of the checkpoint.
"""

from collections.abc import Callable

import torch

from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.wrapped_library import library_module, note_variant

MATRIX_TILE = (16, 16)
"""Rows, and lanes of columns, of a matrix instruction's operand."""

ROWS, COLUMNS = 16, 32
"""What the sizes of a weight must be multiples of for that."""


def _laid_out(weight: QuantizedTensor, experts: int) -> torch.Tensor:
    rows, columns = weight.shape
    whole = weight.plane.view(experts, rows // experts, columns)
    laid_out: torch.Tensor = library_module("aiter.ops.shuffle").shuffle_weight(whole, layout=MATRIX_TILE)
    return laid_out


def make_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,  # noqa: ARG001 - the operation has it; the trait keeps it away
    down_bias: torch.Tensor | None,  # noqa: ARG001 - the operation has it; the trait keeps it away
    activation: GatedActivation,  # noqa: ARG001 - the operation has it; the trait keeps it at silu
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.experts."""
    hidden, intermediate = gate_up.shape[1], down.shape[1]
    experts = down.shape[0] // hidden
    first, second = _laid_out(gate_up, experts), _laid_out(down, experts)
    kinds = library_module("aiter.ops.enum")

    def mixture(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        if x.shape[0] == 0:
            return
        note_variant("aiter mixture", experts, hidden, intermediate, ids.shape[1])
        # The library sorts by every id. One that is not here is expert 0's with a weight of 0.
        here = ids >= 0
        found = library_module("aiter.fused_moe").fused_moe(
            x.to(torch.bfloat16),
            first,
            second,
            torch.where(here, weights, 0.0),
            torch.where(here, ids, 0),
            activation=kinds.ActivationType.Silu,
            quant_type=kinds.QuantType.No,
        )
        out.copy_(found)

    return mixture
