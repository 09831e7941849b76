"""Sampling by whatever kernels the registry chose: the PyTorch reference, or a vendor's."""

from tokenspeed.layers.kernels import KernelBinder


class Backend:
    """The four operations, each bound once."""

    def __init__(self, kernels: KernelBinder) -> None:
        self.has_nan = kernels.has_nan()
        self.apply_penalties = kernels.apply_penalties()
        self.sample = kernels.sample()
        self.logprobs = kernels.logprobs()
