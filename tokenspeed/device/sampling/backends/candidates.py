"""Sampling among the first few candidates of each row, where all rows of a step keep few: top-k of 20 or 64, as most
models' own settings have it.

The first candidates are found once, by one selection that all of a device works on; whatever kernel draws then sees a
vocabulary of that size, in the order of the contract, and draws the token that it would have drawn of the whole: what
top-k leaves is the same, and so are all sums over it. Rows that keep everything, and greedy ones, are drawn of the
whole vocabulary.
"""

import torch

from tokenspeed.device.sampling.backends import registry
from tokenspeed.layers.kernels import KernelBinder

OPERATIONS = registry.OPERATIONS

MOST = 1024
"""Candidates of a row; more are drawn of the whole vocabulary, and so are those of one less than FEW times as large."""

FEW = 4

STEP = 16
"""Numbers of candidates are multiples of it, so that no kernel is compiled for another one while serving."""

_IDS = (1 << 32) - 1


class Backend(registry.Backend):
    """The five operations, each bound once, and the selection before a draw."""

    def __init__(self, kernels: KernelBinder) -> None:
        super().__init__(kernels)
        self._is_warm = False

    def sample(self, *rules: torch.Tensor, most_kept: int) -> None:
        """See SamplingBackend. The first draw, in the warm-up, is made both ways: what either compiles is there
        then."""
        rows, width = rules[0].shape
        count = -(-most_kept // STEP) * STEP
        if not self._is_warm and rows and width >= FEW * STEP:
            self._is_warm = True
            self._among(STEP, *rules)
        if 1 < most_kept <= MOST and FEW * count <= width:
            self._among(count, *rules)
        else:
            super().sample(*rules, most_kept=most_kept)

    def _among(
        self, count: int, logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, *others: torch.Tensor
    ) -> None:
        """Draws among the first ``count`` candidates of each row; top-k of none is 0 or above ``count``."""
        *rest, out = others
        one = torch.ones_like(temperature)
        z = logits / torch.where(top_k == 1, one, temperature).unsqueeze(1)
        ids = first_candidates(z, count)
        drawn = torch.empty_like(out)
        self._sample(z.gather(1, ids), one, top_k, *rest, drawn)
        out.copy_(ids.gather(1, drawn.long().unsqueeze(1)).squeeze(1))


def first_candidates(z: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [S, count]: the ids of z float32 [S, V] by value descending, then id ascending; NaN counts as -inf. Value
    and id are one number, so that no two are equal and a selection knows the order."""
    bits = torch.where(torch.isnan(z), -torch.inf, torch.where(z == 0.0, 0.0, z)).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # which compares as the floats do
    places = _IDS - torch.arange(z.shape[1], device=z.device)
    best = torch.topk((order << 32) | places, count, dim=1).values
    return _IDS - (best & _IDS)
