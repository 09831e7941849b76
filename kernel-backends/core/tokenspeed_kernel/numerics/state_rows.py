"""What the cases of recurrent operations share: rows whose state goes from block to block, and nothing readable around
them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_kernel.numerics.cases import Buffers


@dataclass(frozen=True)
class StateCase:
    """Rows of a batch.

    Attributes:
        lengths: tokens of each row.
        sources, targets: blocks, 0 for none; as in the contract of recurrent.causal_conv.
        blocks: float32 [blocks, state elements]; NaN in all but the sources.
    """

    lengths: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    blocks: torch.Tensor

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """First token, the one behind the last, source and target of each row."""
        stops = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        return list(zip(stops, stops[1:], self.sources, self.targets, strict=False))

    def arena(self, buffers: Buffers, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole arena, and the state's view [blocks, heads, 1, elements] of it, another field being in front."""
        beside = torch.cat([torch.full((self.blocks.shape[0], 3), torch.nan), self.blocks], dim=1)
        arena = buffers.writable("state", beside)
        return arena, arena[:, 3:].view(arena.shape[0], heads, 1, -1)

    def calls(
        self, buffers: Buffers, call: Callable[[slice, torch.Tensor, torch.Tensor, torch.Tensor], None], *, split: bool
    ) -> None:
        """Makes one call of all rows, or one of each token of each row whose state is kept, of each row elsewhere."""

        def one(span: slice, lengths: list[int], sources: list[int], targets: list[int]) -> None:
            starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            held = [
                buffers.read_only(name, values)
                for name, values in (
                    ("starts", starts),
                    ("sources", torch.tensor(sources, dtype=torch.int32)),
                    ("targets", torch.tensor(targets, dtype=torch.int32)),
                )
            ]
            call(span, held[0], held[1], held[2])

        if not split:
            one(slice(0, self.tokens), list(self.lengths), list(self.sources), list(self.targets))
            return
        for first, stop, source, target in self.rows():
            step = 1 if target else max(1, stop - first)
            for token in range(first, stop, step):
                one(slice(token, token + step), [step], [source if token == first else target], [target])


def state_case(rows: list[tuple[int, int, int]], blocks: int, elements: int, generator: torch.Generator) -> StateCase:
    """``rows``: tokens, source and target of each. Sources are random."""
    lengths, sources, targets = zip(*rows, strict=True) if rows else ((), (), ())
    arena = torch.full((blocks, elements), torch.nan)
    for block in sorted({source for source in sources if source}):
        arena[block] = torch.randn(elements, generator=generator)
    return StateCase(lengths, sources, targets, arena)


ROWS: dict[str, list[tuple[int, int, int]]] = {
    "no rows": [],
    "one row from nothing": [(1, 0, 1)],
    "a row that ends where it began": [(5, 2, 2)],
    "rows of all kinds": [(3, 0, 1), (1, 2, 2), (0, 3, 4), (2, 5, 6), (1, 5, 0), (4, 0, 0), (1, 0, 3), (7, 7, 7)],
    "many tokens": [(37, 0, 2), (1, 1, 1)],
}
"""Tokens, source and target of each row, by what they try; blocks 0 … 8."""

BLOCKS = 9
