"""Sampling by whatever kernels the registry chose: the PyTorch reference, or a vendor's."""

import torch

from tokenspeed.layers.kernels import KernelBinder

OPERATIONS = (
    "sampling.has_nan",
    "sampling.apply_penalties",
    "sampling.apply_token_mask",
    "sampling.sample",
    "sampling.logprobs",
)
"""Of which any solution can compute for this backend that has a kernel for each."""


class Backend:
    """The five operations, each bound once."""

    def __init__(self, kernels: KernelBinder) -> None:
        self.has_nan = kernels.has_nan()
        self.apply_penalties = kernels.apply_penalties()
        self.apply_token_mask = kernels.apply_token_mask()
        self.logprobs = kernels.logprobs()
        self._sample = kernels.sample()

    def sample(self, *rules: torch.Tensor, most_kept: int) -> None:  # noqa: ARG002 - the kernels look at all candidates
        """See SamplingBackend."""
        self._sample(*rules)
