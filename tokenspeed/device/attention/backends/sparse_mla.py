"""Sparse latent attention over a paged cache: an indexer selects entries, attention reads those, by whatever kernels
the registry chose."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.paged_rows import PagedRows, Rows
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder


class Backend(PagedRows):
    """One full_history group; an entry may stand for several tokens.

    ``caches`` hold each layer's "latent" [blocks, 1, entries of a block, latent + rotary], its "index_key" [blocks, 1,
    entries of a block, width], or both: layers select in one group and may attend in another.
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
        self._stride = group.entry_stride_tokens or 1
        self._scale = spec.scale
        self._latents = tuple(cache["latent"] for cache in caches if "latent" in cache)
        self._keys = tuple(cache["index_key"] for cache in caches if "index_key" in cache)
        self._one_each = torch.arange(max_rows + 1, dtype=torch.int32)
        if self._latents:
            latents = self._latents[0]
            self._attend = kernels.mla_selected(
                latent_dim=spec.latent_dim,
                rotary_dim=latents.shape[3] - spec.latent_dim,
                page=latents.shape[2],
                kv_dtype=latents.dtype,
            )
        if self._keys:
            keys = self._keys[0]
            self._select = kernels.index_select(
                index_dim=keys.shape[3], index_heads=spec.index_heads, page=keys.shape[2], kv_dtype=keys.dtype
            )

    def _kinds(self) -> list[tuple[slice, Rows, torch.Tensor]]:
        """The tokens, the rows and the first token of each row, of extending rows and of decoding ones behind them."""
        tokens, found = self.extend_tokens, []
        if tokens:
            found.append((slice(0, tokens), self.extend, self.query_start))
        if self.decode.count:
            found.append((slice(tokens, None), self.decode, self._one_each[: self.decode.count + 1]))
        return found

    def select(self, place: int, q: torch.Tensor, weights: torch.Tensor, selected: torch.Tensor) -> None:
        """See tokenspeed.layers.batch.Attention."""
        for part, rows, starts in self._kinds():
            self._select(
                q[part], weights[part], self._keys[place], rows.pages, starts, rows.lengths, self._stride,
                selected[part],
            )  # fmt: skip

    def attend_selected(
        self, place: int, q_latent: torch.Tensor, q_rope: torch.Tensor, selected: torch.Tensor, out: torch.Tensor
    ) -> None:
        """See tokenspeed.layers.batch.Attention."""
        for part, rows, starts in self._kinds():
            self._attend(
                q_latent[part], q_rope[part], self._latents[place], rows.pages, starts, selected[part], self._scale,
                out[part], None,
            )  # fmt: skip
