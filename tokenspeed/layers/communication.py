"""What the ranks of one engine say to each other inside a forward, and the twin of a rank that is alone."""

from typing import Protocol

import torch


class Communication(Protocol):
    """One rank's end. Every rank makes the same calls in the same order, with tensors of the same shapes; each call
    returns when this rank's part is done. It raises RuntimeError where a peer is gone.

    Attributes:
        rank, world: this rank among how many; ranks count from 0.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replaces ``x``, contiguous, by the sum over all ranks: the same bits on each of them."""
        ...

    def minimum(self, x: torch.Tensor) -> None:
        """Replaces ``x``, contiguous, by the least over all ranks, element by element."""
        ...

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes each rank's ``part`` [N] to its row of ``whole`` [world, N]; both contiguous."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Replaces ``x``, contiguous, by that of rank 0."""
        ...


class Alone:
    """A world of one rank, to whom nothing is said."""

    rank = 0
    world = 1

    def all_reduce(self, x: torch.Tensor) -> None:
        """It is the sum already."""

    def minimum(self, x: torch.Tensor) -> None:
        """It is the least already."""

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        whole[0].copy_(part)

    def broadcast(self, x: torch.Tensor) -> None:
        """It is rank 0's already."""


ALONE = Alone()
