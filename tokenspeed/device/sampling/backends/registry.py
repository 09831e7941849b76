"""Sampling by whatever kernels the registry chose: the PyTorch reference, or a vendor's."""

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
        self.sample = kernels.sample()
        self.logprobs = kernels.logprobs()
