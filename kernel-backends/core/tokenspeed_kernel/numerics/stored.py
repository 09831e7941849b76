"""What a cache holds of a number, and of one that is known within a bound."""

import torch

from tokenspeed_kernel.numerics.cases import UNIT_ROUNDOFF, Close

_SMALLEST_EXPONENT, _FRACTION_BITS, _LARGEST = -6, 3, 448.0  # of e4m3: below 2^-6 the step is constant


def _nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float64 of the element of e4m3 that is nearest to x (float64), ties to even, ±448 beyond it; NaN stays NaN."""
    exponent = torch.frexp(x).exponent - 1  # frexp's fraction lies below 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=_SMALLEST_EXPONENT) - _FRACTION_BITS)
    near = torch.where(torch.isfinite(x), torch.round(x / step) * step, x)
    return near.clamp(-_LARGEST, _LARGEST)


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of ``dtype`` holds of float32 ``x``, exactly."""
    return _nearest_e4m3(x.double()).to(dtype) if dtype.itemsize == 1 else x.to(dtype)


def stored(exact: Close, dtype: torch.dtype) -> Close:
    """What a cache of ``dtype`` may hold of a number that lies within a bound.

    Of 8 bits it is exactly what lies between the nearest elements to both ends of that: one, where no middle of two
    elements lies between the ends.
    """
    value, bound = exact.value, exact.bound
    if dtype.itemsize == 1:
        low, high = _nearest_e4m3(value - bound), _nearest_e4m3(value + bound)
        return Close((low + high) / 2.0, (high - low) / 2.0)
    if dtype is torch.float32:
        return exact
    # below the dtype's normal numbers the step is constant
    return Close(value, bound + UNIT_ROUNDOFF[dtype] * (value.abs() + bound) + 2.0**-25)


_EXTREMES = torch.tensor(
    [448.0, -464.0, 480.0, 1e6, -torch.inf, torch.nan, -0.0, 2.0**-9, 2.0**-10, 3.0 * 2.0**-10, -1.0625, 1.1875, 447.9]
)
"""Ends, ties, numbers below the normal ones."""


def with_extremes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, …], its first elements replaced by what 8 bits cannot hold or hold barely, where the dtype has so many."""
    if dtype.itemsize != 1:
        return x
    flat = x.flatten().clone()
    flat[: _EXTREMES.numel()] = _EXTREMES[: flat.numel()]
    return flat.view(x.shape)
