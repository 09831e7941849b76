"""What a model's forward gets: the tokens of one step, and attention prepared for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Attention(Protocol):
    """Attention over cached keys and values, prepared for the batch; reads the cache and never writes it."""

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """``q`` float32 [T, heads, head_dim] of layer ``layer``; writes ``out``, of the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the cache.

    Attributes:
        group: index of the layer's cache group: of its slots in ``ForwardBatch.slots``.
        k, v: strided views [blocks, kv heads, granularity, head_dim] of the arena.
    """

    group: int
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T tokens of one step: those of prefilling rows first, row by row, then one for each decoding row.

    Attributes:
        input_ids: int32 [T].
        positions: int32 [T], each token's index in its sequence.
        slots: for each cache group, int64 [T]: where the prologue writes the token's keys and values.
        attention: prepared for this batch.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[torch.Tensor]
    attention: Attention
