"""The memory that FlashInfer's kernels share, and which of them a device takes."""

from functools import cache

import torch

SCRATCH_BYTES = 128 << 20
"""Of the partial outputs of one call. FlashInfer names this size in its own examples; a plan that wants more fails."""

PLAN_BYTES = 8 << 20
"""Of what a planned wrapper keeps on the device for itself."""


@cache
def scratch(device: torch.device) -> torch.Tensor:
    """Memory for partial outputs: one for all planned kernels of a device, for its stream runs one after another."""
    return torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)


@cache
def counting_scratch(device: torch.device) -> torch.Tensor:
    """The same for kernels that count finished blocks in it: they find zeros and leave zeros, so nobody else may write
    there."""
    return torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=device)


@cache
def generation_of(device: torch.device) -> str:
    """Which of the library's own kernels a device takes, by the name it calls them: "fa3" on Hopper alone. Its choice
    of itself, "auto", may be another library's kernel, whose rules are others."""
    return "fa3" if torch.cuda.get_device_capability(device) == (9, 0) else "fa2"
