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
        pairs_per_expansion: where attention is over latents, the pairs of a query and a key that have to come together
            for each key before the row's own tokens, so that taking keys and values out of their latents is the
            quicker way, see expands; 0.0: it never is.
        visible: whether the layers ask what each token sees, as lists.
        scale: what scores are multiplied by.
        soft_cap: what scores are capped at, see tokenspeed_kernel.ops.attention; 0.0: they are not.
        sinks: each layer's sink scores, float32 [heads]; empty: there are none.
    """

    backend: str
    num_heads: int = 0
    latent_dim: int = 0
    pairs_per_expansion: float = 0.0
    index_heads: int = 0
    visible: bool = False
    scale: float = 1.0
    soft_cap: float = 0.0
    sinks: tuple[torch.Tensor, ...] = ()

    def expands(self, new: int, before: int) -> bool:
        """Whether a row with ``new`` tokens behind ``before`` has its keys and values expanded.

        Each of its tokens and each key before them costs the same either way: absorbed, the products of the token's
        query and output with the up-projection, expanded, those of its key and value. What differs are the pairs, which
        expanded ones do with fewer products, and the keys before the new tokens, which have to be expanded for them.
        """
        pairs = new * before + new * (new + 1) // 2
        return self.pairs_per_expansion > 0.0 and pairs > before * self.pairs_per_expansion
