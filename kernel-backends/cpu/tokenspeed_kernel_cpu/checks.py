"""Argument checks, on where TOKENSPEED_KERNEL_DEBUG=1 was in the environment when the package was imported.

The native kernels trust their arguments: a wrong shape reads or writes foreign memory. Under the switch every call is
checked first; without it a call costs nothing extra.
"""

import os
from collections.abc import Callable, Sequence

import torch

DEBUG = os.environ.get("TOKENSPEED_KERNEL_DEBUG") == "1"


class KernelArgumentError(ValueError):
    """A call that a kernel's contract does not allow."""


Kernel = Callable[..., None]


def checked(check: Kernel) -> Callable[[Kernel], Kernel]:
    """A decorator: in debug mode ``check``, which takes the kernel's arguments, runs before the kernel."""

    def decorate(kernel: Kernel) -> Kernel:
        if not DEBUG:
            return kernel

        def run(*arguments: object) -> None:
            check(*arguments)
            kernel(*arguments)

        return run

    return decorate


def expect(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int],
    *,
    strided_rows: bool = False,
) -> None:
    """Raises KernelArgumentError unless the tensor lies on the CPU with this dtype and shape and is dense.

    strided_rows: only the dimensions after the first must be dense.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.device.type != "cpu":
        raise KernelArgumentError(f"{name} lies on {tensor.device}; the CPU kernels take CPU tensors")
    if tensor.dtype not in dtypes:
        raise KernelArgumentError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != tuple(shape):
        raise KernelArgumentError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
    dense = tensor[0] if strided_rows and tensor.shape[0] > 0 else tensor
    if tensor.numel() > 0 and not dense.is_contiguous():
        raise KernelArgumentError(f"{name} has strides {list(tensor.stride())}; it must be dense in memory")


def expect_range(name: str, values: torch.Tensor, low: int, high: int) -> None:
    """Raises KernelArgumentError unless every element lies in [low, high)."""
    if values.numel() and not (low <= int(values.min()) and int(values.max()) < high):
        raise KernelArgumentError(
            f"{name} holds values from {int(values.min())} to {int(values.max())}; they must lie in [{low}, {high})"
        )
