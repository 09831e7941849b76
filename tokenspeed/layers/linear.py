"""Linear layers, single and stacked, over weights that stay where the file has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.shard import Shard
from tokenspeed.layers.weights import joined
from tokenspeed_kernel.quantized import QuantizedTensor


class Linear:
    """out = x · weightᵀ + bias for one rank's shard.

    Attributes:
        shard: which part the weight is; of a "columns" shard among several ranks the results are partial sums.
        forward: the bound kernel: ``forward(x float32 [T, K], out float32 [T, N])``, both contiguous.
    """

    def __init__(self, kernels: KernelBinder, weight: QuantizedTensor, bias: torch.Tensor | None, shard: Shard) -> None:
        self.shard = shard
        self.forward = kernels.linear(weight, bias)


@dataclass(frozen=True, slots=True)
class StackedOutputs:
    """One piece of memory seen both ways a StackedLinear may fill it, for T tokens.

    Attributes:
        whole: float32 [T, N], N the sum of the parts' widths.
        whole_parts: the parts as column ranges of ``whole``, in their own shapes (rows are N apart).
        separate: float32 [T, width] for each part, contiguous, one behind the other.
        separate_parts: the same in their own shapes.
    """

    whole: torch.Tensor
    whole_parts: tuple[torch.Tensor, ...]
    separate: tuple[torch.Tensor, ...]
    separate_parts: tuple[torch.Tensor, ...]

    @staticmethod
    def of(buffer: torch.Tensor, tokens: int, shapes: Sequence[tuple[int, ...]]) -> "StackedOutputs":
        """Views of the flat ``buffer`` for ``tokens`` tokens; ``shapes`` is each part's shape for one token."""
        widths = [torch.Size(shape).numel() for shape in shapes]
        ends = list(accumulate(widths))
        whole = buffer[: tokens * ends[-1]].view(tokens, ends[-1])
        columns, separate = [], []
        for width, end in zip(widths, ends, strict=True):
            columns.append(whole[:, end - width : end])
            separate.append(buffer[tokens * (end - width) : tokens * end].view(tokens, width))
        return StackedOutputs(
            whole=whole,
            whole_parts=tuple(part.view(tokens, *shape) for part, shape in zip(columns, shapes, strict=True)),
            separate=tuple(separate),
            separate_parts=tuple(part.view(tokens, *shape) for part, shape in zip(separate, shapes, strict=True)),
        )


class StackedLinear:
    """Several linears of one input (q, k, v; gate, up): one product where their weights join cheaply, else several."""

    def __init__(
        self,
        kernels: KernelBinder,
        weights: Sequence[QuantizedTensor],
        biases: Sequence[torch.Tensor | None],
        shard: Shard,
    ) -> None:
        self.shard = shard
        whole = joined(weights)
        self.is_joined = whole is not None
        if whole is not None:
            linears = [kernels.linear(whole, _joined_biases(weights, biases))]
        else:
            linears = [kernels.linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        self._linears = tuple(linears)

    def forward(self, x: torch.Tensor, outputs: StackedOutputs) -> tuple[torch.Tensor, ...]:
        """Computes all parts of ``x`` float32 [T, K] and returns them as views of ``outputs``."""
        if self.is_joined:
            self._linears[0](x, outputs.whole)
            return outputs.whole_parts
        for linear, out in zip(self._linears, outputs.separate, strict=True):
            linear(x, out)
        return outputs.separate_parts


def _joined_biases(weights: Sequence[QuantizedTensor], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(weight.shape[0], device=weight.plane.device) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )
