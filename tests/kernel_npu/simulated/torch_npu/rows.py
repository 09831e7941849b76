"""Norms, activations, rotary and the scattered write."""

from collections.abc import Callable
from typing import Any

import torch

from torch_npu.needs import FLOATS, need, need_dense, need_dtype


def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
    need_dense(input=input, gamma=gamma)
    need_dtype(FLOATS, input=input, gamma=gamma)
    need(2 <= input.dim() <= 8, f"input has {input.dim()} dimensions")
    wide = input.float()
    inverse = 1.0 / torch.sqrt((wide * wide).sum(dim=-1, keepdim=True) / input.shape[-1] + epsilon)
    return (wide * inverse * gamma.float()).to(input.dtype), inverse


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    need_dtype(FLOATS, x1=x1, x2=x2, gamma=gamma)
    need(x1.shape == x2.shape, f"x1 {list(x1.shape)} and x2 {list(x2.shape)} differ")
    total = x1 + x2
    found, inverse = rms_norm(total, gamma, epsilon)
    return found, inverse, total


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:  # noqa: A002
    need_dtype(FLOATS, input=input)
    need_dense(input=input)
    a, b = torch.chunk(input.float(), 2, dim)
    return (a / (1.0 + torch.exp(-a)) * b).to(input.dtype)


def clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    need_dtype(FLOATS, x=x)
    need_dense(x=x)
    need(group_index is None and dim in (-1, x.dim() - 1) and x.dim() > 1, "this stand-in takes the last axis alone")
    wide = x.float()
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)


def rotary_mul(
    input: torch.Tensor,  # noqa: A002
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Layout BSND: input [B, S, N, D], r1 and r2 [1, S, 1, D]."""
    need_dtype(FLOATS, input=input, r1=r1, r2=r2)
    need(rotate is None and rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    need(input.dim() == r1.dim() == r2.dim() == 4, "4 dimensions each")
    batch, tokens, heads, width = input.shape
    need(width < 896 and width % 2 == 0 and batch < 1000 and heads < 1000, f"{list(input.shape)} is too large, or odd")
    need(r1.shape == r2.shape == (1, tokens, 1, width), f"r1 {list(r1.shape)}, r2 {list(r2.shape)} are not 1S1D")
    if rotary_mode == "half":
        low, high = input.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
    else:
        turned = torch.stack((-input[..., 1::2], input[..., ::2]), dim=-1).flatten(-2)
    return r1 * input + r2 * turned


def scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:  # noqa: A002
    need_dtype((*FLOATS, torch.bool, torch.int64, torch.int8), input=input, updates=updates)
    need(indices.dtype in (torch.int32, torch.int64) and indices.dim() >= 2, f"indices are {indices.dtype}")
    depth = indices.shape[-1]
    need(depth <= input.dim(), f"{depth} indices into {input.dim()} dimensions")
    need(updates.shape == indices.shape[:-1] + input.shape[depth:], f"updates are {list(updates.shape)}")
    limits = torch.tensor(input.shape[:depth])
    need(bool(((indices >= 0) & (indices < limits)).all()), "an index is out of range")
    input.index_put_(tuple(indices.long().unbind(-1)), updates)
    return input


def mm_dtype(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """torch's own product with a result of another dtype."""
    need_dtype((torch.float16, torch.bfloat16), x=x, weight=weight)
    need(out_dtype is torch.float32, f"a result in {out_dtype}")
    return x.float() @ weight.float()


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_swiglu": swiglu,
    "npu_clipped_swiglu": clipped_swiglu,
    "npu_rotary_mul": rotary_mul,
    "npu_scatter_nd_update_": scatter_nd_update_,
}
