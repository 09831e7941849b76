"""Latent attention over a paged cache of latents, queries absorbed, by whatever kernels the registry chose."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.paged_rows import PagedRows
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder


class Backend(PagedRows):
    """Decode and extend for one full_history group of latents.

    ``caches`` hold each layer's "latent" [blocks, 1, granularity, latent + rotary].
    """

    def __init__(
        self,
        kernels: KernelBinder,
        *,
        group: CacheGroupSpec,
        spec: AttentionSpec,
        caches: Sequence[Mapping[str, torch.Tensor]],
        max_rows: int,
        table_slots: int,
    ) -> None:
        super().__init__(group.group_id, max_rows=max_rows, table_slots=table_slots)
        self._caches = tuple(cache["latent"] for cache in caches)
        self._scale = spec.scale
        latents = self._caches[0]
        self._decode, self._extend = (
            kernels.mla_read(
                mode,
                latent_dim=spec.latent_dim,
                rotary_dim=latents.shape[3] - spec.latent_dim,
                page=latents.shape[2],
                kv_dtype=latents.dtype,
            )
            for mode in ("mla_decode", "mla_extend")
        )

    def attend_latent(self, place: int, q_latent: torch.Tensor, q_rope: torch.Tensor, out: torch.Tensor) -> None:
        """Extending rows first, then decoding rows; see tokenspeed.layers.batch.Attention."""
        cache, rows, tokens = self._caches[place], self.extend, self.extend_tokens
        if tokens:
            self._extend(
                q_latent[:tokens], q_rope[:tokens], cache, rows.pages, self.query_start, rows.lengths, self._scale,
                out[:tokens],
            )  # fmt: skip
            q_latent, q_rope, out = q_latent[tokens:], q_rope[tokens:], out[tokens:]
        rows = self.decode
        if rows.count:
            self._decode(q_latent, q_rope, cache, rows.pages, rows.lengths, self._scale, out, None)
