"""What a model's forward gets: the tokens of one step, and attention prepared for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the rows of a batch have their state, B rows with T tokens.

    Attributes:
        starts: int32 [B + 1]: row b has the tokens starts[b] up to starts[b + 1].
        sources: int32 [B]: the block with the state before the row's first token; 0: there is none yet, it is zero.
        targets: int32 [B]: the block that the state behind its last token is written to; 0: to none.
    """

    starts: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Compressor:
    """How tokens become an entry; the kernel, and what it takes besides caches and rows: see
    tokenspeed_kernel.ops.compressed."""

    kernel: Callable[..., None]
    bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    cos_sin: torch.Tensor
    overlapping: bool


class Attention(Protocol):
    """What the layers of one cache group ask, prepared for the batch; each backend has what its layers need.

    ``place`` is a layer's place among those of the group. Caches are read and never written here.
    """

    def attend(self, place: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Of grouped queries: ``q`` float32 [T, heads, head_dim]; writes ``out``, of the same shape."""
        ...

    def attend_latent(self, place: int, q_latent: torch.Tensor, q_rope: torch.Tensor, out: torch.Tensor) -> None:
        """Of absorbed queries: float32 [T, heads, latent] and [T, heads, rotary]; writes ``out`` [T, heads, latent].
        Only the tokens of ``absorbed`` are read and written."""
        ...

    @property
    def absorbed(self) -> Sequence[slice]:
        """The tokens of a group of latents that attend absorbed, in order. The others have keys and values expanded."""
        ...

    def attend_expanded(self, place: int, kernel: Callable[..., None], q: torch.Tensor, out: torch.Tensor) -> None:
        """Of those others: ``q`` float32 [T, heads, plain + rotary]; writes their tokens of ``out`` [T, heads, value]
        by the layer's ``kernel``, see tokenspeed_kernel.ops.mla_expanded."""
        ...

    def select(self, place: int, q: torch.Tensor, weights: torch.Tensor, selected: torch.Tensor) -> None:
        """Of an indexer: ``q`` float32 [T, heads, width], ``weights`` float32 [T, heads]; writes ``selected`` int32
        [T, k], each token's best entries, see tokenspeed_kernel.ops.sparse."""
        ...

    def attend_selected(
        self,
        place: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """As attend_latent, over the entries of each token's own list, ``selected`` int32 [T, k]; ``lse`` float32
        [T, heads] where it is needed, see tokenspeed_kernel.ops.sparse."""
        ...

    @property
    def visible(self) -> torch.Tensor:
        """int32 [T, n]: the entries that each token sees, ascending, -1 behind them."""
        ...

    def compress(
        self,
        values: torch.Tensor,
        gates: torch.Tensor,
        compressor: Compressor,
        entry_cache: torch.Tensor,
        entry_slots: torch.Tensor,
    ) -> None:
        """Of a group of a compressor's inputs: its caches, written before; makes the entries that this step completes,
        see tokenspeed_kernel.ops.compressed."""
        ...

    @property
    def state_rows(self) -> StateRows:
        """Of a group of states."""
        ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of one cache group.

    Attributes:
        group: index of the group: of its slots and its attention in a ``ForwardBatch``.
        place: the layer's place among those of the group.
        fields: by name, strided views [blocks, heads, rows of a block, dim] of the arena.
    """

    group: int
    place: int
    fields: Mapping[str, torch.Tensor]


Body = Callable[..., None]
"""``body(batch, *arguments)``; see ForwardBatch.apart."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T tokens of one step: those of prefilling rows first, row by row, then one for each decoding row.

    Attributes:
        input_ids: int32 [T].
        positions: int32 [T], each token's index in its sequence.
        slots: for each cache group, int64 [T]: where the prologue writes what the token leaves there.
        attention: of each cache group, prepared for this batch.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[torch.Tensor]
    attention: Sequence[Attention]

    def apart(self, body: Body, *arguments: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Runs ``body(batch, *arguments)``, the part of a layer that asks ``attention``: it depends on how the tokens
        belong to rows, so where a forward is captured in pieces this stays out of them (device/graphs/pieces.py).

        All ``arguments`` have a row for each token; ``body`` writes the last of them (or all within it) and the caches,
        and leaves nothing else that the layer reads. It takes ``attention`` and ``slots`` from the batch it is given.
        """
        body(self, *arguments)
