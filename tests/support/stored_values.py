"""Caches that two kernels wrote of the same values, each with a rounding of its own before they were stored."""

import torch

_STEP = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float8_e4m3fn: 0.126}
"""A step of the dtype, relative to a value; of float32 what two orders of adding differ by."""


def assert_stored_alike(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> None:
    """Float32 of what is stored as ``dtype``: equal but for single steps where a value lay at the middle of two."""
    step = _STEP[dtype]
    torch.testing.assert_close(one, other, rtol=step, atol=2.0**-9 if dtype.itemsize == 1 else step, equal_nan=True)
    if dtype is not torch.float32:
        differing = (one != other) & ~(one.isnan() & other.isnan())
        assert int(differing.sum()) <= 2 + one.numel() // 500
