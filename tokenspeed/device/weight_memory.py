"""Weights on a device: copied there in pieces by way of pinned memory, so that the host never holds all of them."""

from collections.abc import Sequence

import torch

from tokenspeed.device.placement import Placement
from tokenspeed_kernel.quantized import QuantizedTensor

PIECE_BYTES = 32 << 20
"""Of one copy: one is on its way while the next is read from the file."""

ALIGNMENT = 16
"""Bytes: where a weight begins, for loads and copies of that width. Neighbours whose sizes are multiples of it touch,
and can join."""


class DeviceWeights:
    """See WeightMemory of tokenspeed.layers.loader."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._stages = [(placement.host_zeros(PIECE_BYTES), placement.mark()) for _ in range(2)]

    def keep(self, runs: Sequence[Sequence[QuantizedTensor]]) -> list[QuantizedTensor]:
        kept = [weight for run in runs for weight in self._run(run)]
        for _, left in self._stages:
            left.wait()
        return kept

    def _run(self, weights: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
        """Copies in one piece of memory; the last of them may be under way."""
        sizes = [-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self._placement.device)
        kept, start = [], 0
        for weight, size in zip(weights, sizes, strict=True):
            planes = {}
            first = start
            for name, plane in weight.planes.items():
                here = memory[first : first + plane.nbytes]
                self._copy(plane.view(-1).view(torch.uint8), here)
                planes[name] = here.view(plane.dtype).view(plane.shape)
                first += plane.nbytes
            kept.append(QuantizedTensor(weight.format, weight.shape, planes, weight.source))
            start += size
        return kept

    def keep_vector(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.to(self._placement.device)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Bytes, piece by piece: one stage is filled while the other's copy is under way."""
        for start in range(0, source.numel(), PIECE_BYTES):
            stage, left = self._stages[0]
            self._stages.reverse()
            piece = source[start : start + PIECE_BYTES]
            left.wait()
            staged = stage[: piece.numel()].copy_(piece)
            target[start : start + PIECE_BYTES].copy_(staged, non_blocking=True)
            left.set()
