"""The contract of a sampling backend: five operations over logits float32 [S, V]. A test holds all of them to it."""

from typing import Protocol

import torch


class SamplingBackend(Protocol):
    """Greedy is top-k 1: there is no second arm. Outputs are the caller's."""

    def has_nan(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` bool [S]: whether a row holds a NaN."""
        ...

    def apply_penalties(
        self,
        logits: torch.Tensor,
        counts: torch.Tensor,
        prompt_mask: torch.Tensor,
        rows: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> None:
        """In place. ``counts`` int32, ``prompt_mask`` bool [R, V]; ``rows`` int32 [S] in them; the rest float32 [S]."""
        ...

    def apply_token_mask(self, logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
        """In place. ``mask`` int32 [R, ceil(V / 32)]; ``rows`` int32 [S] in it, or -1 for a row left alone."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
        choice: torch.Tensor,
        position: torch.Tensor,
        out: torch.Tensor,
        *,
        most_kept: int,
    ) -> None:
        """Draws ``out`` int32 [S] by seed, choice and position of each row; may overwrite the logits. ``most_kept``:
        the largest ``top_k``, known to the host; 0 where some row keeps all."""
        ...

    def logprobs(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        k: int,
        out_logprob: torch.Tensor,
        top_ids: torch.Tensor,
        top_logprobs: torch.Tensor,
    ) -> None:
        """Natural-log probabilities of ``ids`` int32 [S] and of the ``k`` most probable tokens of each row."""
        ...
