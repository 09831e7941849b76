"""rotary.apply, attention.gqa_prologue and attention.mla_prologue on the device; contracts in tokenspeed_kernel.ops.

A program takes one head of one token, so its bits depend on no other.
"""

import torch

from tokenspeed_kernel_triton.device import loadable
from tokenspeed_kernel_triton.loading import Launch


def _block(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def apply_of(
    x: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None, cos_sin: torch.Tensor, interleaved: bool
) -> Launch:
    """The launch of a rotation in place."""
    half = cos_sin.shape[1] // 2
    arguments = (
        x,
        positions,
        positions if axes is None else axes,
        cos_sin,
        *x.stride()[:2],
        positions.stride(0) if positions.shape[0] > 1 else 0,
        cos_sin.stride(0),
    )
    constants = {
        "HALF": half,
        "BLOCK_HALF": _block(half),
        "INTERLEAVED": interleaved,
        "MANY_AXES": axes is not None,
    }
    return Launch("rotary", "apply", (x.shape[0], x.shape[1]), arguments, constants, warps=1)


def apply(
    x: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    """rotary.apply."""
    if x.shape[0]:
        apply_of(x, positions, axes, cos_sin, interleaved).run()


def gqa_prologue_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> Launch:
    """The launch of the prologue of grouped-query attention."""
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    arguments = (
        q,
        k,
        v,
        positions,
        cos_sin,
        cos_sin if q_norm is None else q_norm,
        cos_sin if k_norm is None else k_norm,
        float(eps),
        loadable(k_cache),
        loadable(v_cache),
        slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        cos_sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
    )
    constants = {
        "QUERY_HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "HALF": half,
        "BLOCK_HALF": _block(half),
        "BLOCK_REST": _block(dim - 2 * half),
        "NORMED": q_norm is not None,
        "PAGE": k_cache.shape[2],
    }
    return Launch("rotary", "gqa_prologue", (tokens, heads + 2 * kv_heads), arguments, constants, warps=1)


def gqa_prologue(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """attention.gqa_prologue."""
    if q.shape[0]:
        gqa_prologue_of(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots).run()


def mla_prologue_of(
    q: torch.Tensor,
    compressed: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    latent_norm: torch.Tensor,
    eps: float,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
) -> Launch:
    """The launch of the prologue of latent attention."""
    tokens, heads, dim = q.shape
    half, latent = cos_sin.shape[1] // 2, latent_norm.shape[0]
    arguments = (
        q,
        compressed,
        positions,
        cos_sin,
        latent_norm,
        float(eps),
        loadable(latent_cache),
        slots,
        q.stride(0),
        compressed.stride(0),
        cos_sin.stride(0),
        latent_cache.stride(0),
        latent_cache.stride(2),
    )
    constants = {
        "HEADS": heads,
        "HEAD_DIM": dim,
        "LATENT": latent,
        "BLOCK_LATENT": _block(latent),
        "HALF": half,
        "BLOCK_HALF": _block(half),
        "PAGE": latent_cache.shape[2],
    }
    return Launch("rotary", "mla_prologue", (tokens, heads + 1), arguments, constants, warps=1)


def mla_prologue(
    q: torch.Tensor,
    compressed: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    latent_norm: torch.Tensor,
    eps: float,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """attention.mla_prologue."""
    if q.shape[0]:
        mla_prologue_of(q, compressed, positions, cos_sin, latent_norm, eps, latent_cache, slots).run()
