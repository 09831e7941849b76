"""Sampling among several ranks: rank 0 draws, the others are told. So nothing that it takes (seeds, penalties, masks of
a grammar) has to be anywhere else, and no two ranks can draw differently."""

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.sampling.backend import SamplingBackend
from tokenspeed.device.sampling.sampler import Logprobs, Sampled, Sampler
from tokenspeed.layers.communication import Communication


def make_sampler(
    backend: SamplingBackend, communication: Communication, *, num_rows: int, max_batch: int, vocab_size: int
) -> Sampler:
    """A plain one for a rank alone."""
    if communication.world == 1:
        return Sampler(backend, num_rows=num_rows, max_batch=max_batch, vocab_size=vocab_size)
    kind = LeadingSampler if communication.rank == 0 else FollowingSampler
    return kind(backend, communication, num_rows=num_rows, max_batch=max_batch, vocab_size=vocab_size)


class _RankSampler(Sampler):
    def __init__(
        self, backend: SamplingBackend, communication: Communication, *, num_rows: int, max_batch: int, vocab_size: int
    ) -> None:
        super().__init__(backend, num_rows=num_rows, max_batch=max_batch, vocab_size=vocab_size)
        self._communication = communication


class LeadingSampler(_RankSampler):
    """Rank 0's: says what it drew."""

    def sample(self, logits: torch.Tensor, rows: NDArray[np.intp], positions: NDArray[np.int32]) -> Sampled:
        sampled = super().sample(logits, rows, positions)
        told = np.stack([sampled.tokens, sampled.nan.astype(np.int32)])
        self._communication.broadcast(torch.from_numpy(told))
        return sampled


class FollowingSampler(_RankSampler):
    """Any other rank's: it is told the tokens and which rows held a NaN, and takes no log-probabilities."""

    def sample(self, logits: torch.Tensor, rows: NDArray[np.intp], positions: NDArray[np.int32]) -> Sampled:
        del logits, positions  # rank 0 looked at them
        told = torch.empty(2, rows.shape[0], dtype=torch.int32)
        self._communication.broadcast(told)
        return Sampled(tokens=told[0].numpy(), nan=told[1].numpy().astype(np.bool_), logprobs=None)

    def prompt_logprobs(self, logits: torch.Tensor, targets: NDArray[np.int32], k: int) -> Logprobs:
        del logits, k  # its part of the logits was all that was asked of this rank
        count = targets.shape[0]
        nothing = np.zeros((count, 0), np.int32)
        return Logprobs(np.zeros(count, np.float32), nothing, nothing.astype(np.float32))
