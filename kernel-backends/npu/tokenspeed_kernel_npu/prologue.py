"""attention.gqa_prologue and attention.mla_prologue: norm and rotary in float32, then the write to the cache.

Pages have a head's tokens side by side, which none of torch_npu's cache writers takes: they want a token's heads
together. So entries are scattered, one for each head.
"""

import torch

from tokenspeed_kernel_npu.elementwise import normed, rotated
from tokenspeed_kernel_npu.operators import call


def _write(entries: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes entries [T, heads, D] to ``cache`` [blocks, heads, g, D]; what has no slot goes to block 0."""
    tokens, heads, width = entries.shape
    granularity = cache.shape[2]
    slots = slots.clamp(min=0).unsqueeze(1).expand(tokens, heads)
    head = torch.arange(heads, device=slots.device).expand(tokens, heads)
    places = torch.stack([slots // granularity, head, slots % granularity], dim=-1)
    updates = entries.to(cache.dtype).reshape(tokens * heads, width)
    call("npu_scatter_nd_update_", input=cache, indices=places.view(tokens * heads, 3), updates=updates)


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
    if q.shape[0] == 0:
        return
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    rotary = cos_sin.shape[1]
    for heads, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            heads.copy_(normed(heads.contiguous(), weight, eps))
        turned = heads[..., :rotary]
        turned.copy_(rotated(turned, cos, sin, interleaved=False))
    _write(k, k_cache, slots)
    _write(v, v_cache, slots)


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
    if q.shape[0] == 0:
        return
    rotary = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    turned = q[..., q.shape[-1] - rotary :]
    turned.copy_(rotated(turned, cos, sin, interleaved=False))
    latent, key = torch.split(compressed, [latent_norm.shape[0], rotary], dim=-1)
    entry = [normed(latent.contiguous(), latent_norm, eps), rotated(key.unsqueeze(1), cos, sin, False).squeeze(1)]
    _write(torch.cat(entry, dim=-1).unsqueeze(1), latent_cache, slots)
