"""Embedding and output head whose vocabulary the ranks share: each has a range of its tokens.

A range is as long as the next one, but for the last, which may be shorter: vocabularies need not be divisible.
"""

import torch

from tokenspeed.layers.communication import Communication
from tokenspeed.layers.kernel_choice import Kernel
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.shard import Shard
from tokenspeed_kernel.quantized import QuantizedTensor


class Vocabulary:
    """Binds embedding and head; alone they are the kernels themselves, with nothing around them.

    Args:
        size: of the whole vocabulary.
        max_tokens: bounds the tokens of a step; ``max_rows`` the rows of logits.

    Attributes:
        nbytes: of the buffers beside the kernels; 0 alone.
    """

    def __init__(
        self, kernels: KernelBinder, communication: Communication, *, size: int, max_tokens: int, max_rows: int
    ) -> None:
        self._kernels = kernels
        self._communication = communication
        self._ranges = [
            Shard(kind="vocabulary", rank=rank, world=communication.world).row_range(size)
            for rank in range(communication.world)
        ]
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self.nbytes = 0

    def embedding(self, weight: QuantizedTensor) -> Kernel:
        """``fn(ids int32 [T], out float32 [T, H])`` of the ids of the whole vocabulary."""
        embed = self._kernels.embedding(weight)
        if self._communication.world == 1:
            return embed
        first, last = self._ranges[self._communication.rank]
        own_ids = torch.zeros(self._max_tokens, dtype=torch.int32, device=weight.plane.device)
        self.nbytes += own_ids.nbytes
        all_reduce = self._communication.all_reduce

        def lookup(ids: torch.Tensor, out: torch.Tensor) -> None:
            own = own_ids[: ids.shape[0]]
            torch.sub(ids, first, out=own)
            elsewhere = (ids < first) | (ids >= last)
            own.masked_fill_(elsewhere, 0)
            embed(own, out)
            out.masked_fill_(elsewhere.unsqueeze(1), 0.0)
            all_reduce(out)

        return lookup

    def head(self, weight: QuantizedTensor) -> Kernel:
        """``fn(x float32 [S, H], logits float32 [S, V])``, the logits of the whole vocabulary on every rank."""
        project = self._kernels.linear(weight, None)
        world = self._communication.world
        if world == 1:
            return project
        sizes = [last - first for first, last in self._ranges]
        device = weight.plane.device
        gathered = torch.zeros(world, self._max_rows * max(sizes), device=device)
        part = torch.zeros(self._max_rows * max(sizes), device=device)
        self.nbytes += gathered.nbytes + part.nbytes
        own, all_gather = sizes[self._communication.rank], self._communication.all_gather

        def logits_of(x: torch.Tensor, logits: torch.Tensor) -> None:
            rows = x.shape[0]
            mine, whole = part[: rows * max(sizes)], gathered.view(-1)[: world * rows * max(sizes)].view(world, -1)
            project(x, mine[: rows * own].view(rows, own))
            all_gather(mine, whole)
            for (first, last), size, theirs in zip(self._ranges, sizes, whole, strict=True):
                logits[:, first:last] = theirs[: rows * size].view(rows, size)

        return logits_of
