"""How the layers of a cache group attend: what a model tells the execution plane to prepare for it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Of one cache group.

    Attributes:
        backend: the file of tokenspeed/device/attention/backends that serves it.
        num_heads: query heads; 0 for a state, which has none.
        latent_dim: elements of the latent, where attention is over latents.
        index_heads: heads of the indexer, where entries are selected.
        visible: whether the layers ask what each token sees, as lists.
        scale: what scores are multiplied by.
        soft_cap: what scores are capped at, see tokenspeed_kernel.ops.attention; 0.0: they are not.
        sinks: each layer's sink scores, float32 [heads]; empty: there are none.
    """

    backend: str
    num_heads: int = 0
    latent_dim: int = 0
    index_heads: int = 0
    visible: bool = False
    scale: float = 1.0
    soft_cap: float = 0.0
    sinks: tuple[torch.Tensor, ...] = ()
