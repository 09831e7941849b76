"""Sparse latent attention over a paged cache: an indexer selects entries, attention reads those, by whatever kernels
the registry chose."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.backend import ForwardMode
from tokenspeed.device.attention.paged_rows import PagedRows
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder


class Backend(PagedRows):
    """One history group; an entry may stand for several tokens. A window is in tokens of one entry each.

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
        self._window = group.sliding_window_tokens or 0
        self._lists: torch.Tensor | None = None
        if spec.visible:
            entries = self._window or table_slots * group.rows_per_block
            self._lists = torch.zeros(max_rows, entries, dtype=torch.int32)
            self._visible = self._lists[:0]
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

    @property
    def visible(self) -> torch.Tensor:
        """See tokenspeed.layers.batch.Attention; of a decode of the same size, in the same memory."""
        return self._visible

    def refresh_decode_metadata(
        self,
        bs: int,
        actual_bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        forward_mode: ForwardMode,
        block_tables: Mapping[str, torch.Tensor],
        for_graph_replay: bool,
    ) -> None:
        """See the contract."""
        super().refresh_decode_metadata(
            bs,
            actual_bs,
            req_pool_indices,
            seq_lens,
            forward_mode=forward_mode,
            block_tables=block_tables,
            for_graph_replay=for_graph_replay,
        )
        if self._lists is not None:
            self._visible = self._list_visible(self._lists)

    def _list_visible(self, lists: torch.Tensor) -> torch.Tensor:
        """The lists of all tokens; those of decoding ones, where no others are, in ``lists``."""
        ends = []  # the position behind each token's own
        for _, rows, starts in self._kinds():
            counts = starts.diff()
            behind = torch.repeat_interleave(rows.lengths - starts[1:], counts)
            ends.append(torch.arange(1, int(counts.sum()) + 1, dtype=torch.int32) + behind)
        if not ends:
            return lists[:0]
        stop = (torch.cat(ends).clamp(min=0) // self._stride).unsqueeze(1)
        first = (stop - self._window).clamp(min=0) if self._window else torch.zeros_like(stop)
        if self.extend_tokens:
            width = max(1, int((stop - first).max()))
            lists = torch.empty(stop.shape[0], width, dtype=torch.int32)
        else:
            lists = lists[: stop.shape[0]]
        torch.add(first, torch.arange(lists.shape[1], dtype=torch.int32), out=lists)
        return lists.masked_fill_(lists >= stop, -1)

    def select(self, place: int, q: torch.Tensor, weights: torch.Tensor, selected: torch.Tensor) -> None:
        """See tokenspeed.layers.batch.Attention."""
        for part, rows, starts in self._kinds():
            self._select(
                q[part], weights[part], self._keys[place], rows.pages, starts, rows.lengths, self._stride,
                selected[part],
            )  # fmt: skip

    def attend_selected(
        self,
        place: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See tokenspeed.layers.batch.Attention."""
        for part, rows, starts in self._kinds():
            self._attend(
                q_latent[part], q_rope[part], self._latents[place], rows.pages, starts, selected[part], self._scale,
                out[part], None if lse is None else lse[part],
            )  # fmt: skip
