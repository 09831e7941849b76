"""Sampling among several ranks: rank 0 draws, the others are told. So nothing that it takes (seeds, penalties, masks of
a grammar) has to be anywhere else, and no two ranks can draw differently."""

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.placement import Landing, Placement
from tokenspeed.device.sampling.backend import SamplingBackend
from tokenspeed.device.sampling.sampler import Draw, Logprobs, Sampler
from tokenspeed.layers.communication import Communication


def make_sampler(
    placement: Placement,
    backend: SamplingBackend,
    communication: Communication,
    *,
    num_rows: int,
    max_batch: int,
    vocab_size: int,
) -> Sampler:
    """A plain one for a rank alone."""
    if communication.world == 1:
        return Sampler(placement, backend, num_rows=num_rows, max_batch=max_batch, vocab_size=vocab_size)
    kind = LeadingSampler if communication.rank == 0 else FollowingSampler
    return kind(placement, backend, communication, num_rows=num_rows, max_batch=max_batch, vocab_size=vocab_size)


class _RankSampler(Sampler):
    def __init__(
        self,
        placement: Placement,
        backend: SamplingBackend,
        communication: Communication,
        *,
        num_rows: int,
        max_batch: int,
        vocab_size: int,
    ) -> None:
        super().__init__(placement, backend, num_rows=num_rows, max_batch=max_batch, vocab_size=vocab_size)
        self._communication = communication


class LeadingSampler(_RankSampler):
    """Rank 0's: says what it drew."""

    def draw(self, draw: Draw, logits: torch.Tensor, landing: Landing) -> None:
        super().draw(draw, logits, landing)
        self._communication.broadcast(draw.outcome.both)


class FollowingSampler(_RankSampler):
    """Any other rank's: it is told the tokens and which rows held a NaN, and takes no log-probabilities."""

    def draw(self, draw: Draw, logits: torch.Tensor, landing: Landing) -> None:
        del logits  # rank 0 looked at them
        self._communication.broadcast(draw.outcome.both)
        draw.drawn = landing.take(draw.outcome.both)

    def prompt_logprobs(self, logits: torch.Tensor, targets: NDArray[np.int32], k: int, landing: Landing) -> Logprobs:
        del logits, k, landing  # its part of the logits was all that was asked of this rank
        count = targets.shape[0]
        nothing = np.zeros((count, 0), np.int32)
        return Logprobs(np.zeros(count, np.float32), nothing, nothing.astype(np.float32))
