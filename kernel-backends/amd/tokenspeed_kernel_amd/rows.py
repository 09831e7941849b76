"""norm.rms and norm.fused_add_rms by AITER's Triton kernels; contracts in tokenspeed_kernel.ops.norm.

Its compiled kernels take 16 bits only; these take our float32. They tell the compiler that rows begin at multiples of
16, so rows of other widths are the shared Triton layer's.
"""

import torch

from tokenspeed_kernel.wrapped_library import library_module, note_variant
from tokenspeed_kernel_triton import elementwise

ALIGNMENT = 16


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """norm.rms. The library makes an output of its own, which is copied."""
    if x.shape[1] % ALIGNMENT:
        elementwise.rms(x, weight, eps, out)
    elif x.shape[0]:
        note_variant("aiter rms norm", x.shape[1])
        out.copy_(library_module("aiter.ops.triton.rmsnorm").rms_norm(x, weight, eps))


def fused_add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """norm.fused_add_rms. A row is one program's, which reads it before it writes: the residual goes in and out in
    place, and ``out`` may be ``x``."""
    if x.shape[1] % ALIGNMENT:
        elementwise.fused_add_rms(x, residual, weight, eps, out)
    elif x.shape[0]:
        note_variant("aiter rms norm behind an addition", x.shape[1])
        library_module("aiter.ops.triton.rmsnorm").rmsnorm2d_fwd_with_add(out, x, residual, residual, weight, eps)
