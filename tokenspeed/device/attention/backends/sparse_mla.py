"""Sparse latent attention over a paged cache: an indexer selects entries, attention reads those, by whatever kernels
the registry chose."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.backend import ForwardMode, QueryShardPlan, device_of
from tokenspeed.device.attention.paged_rows import PagedRows
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

OPERATIONS = ("attention.index_select", "attention.mla_selected")
"""Of which any solution can compute for this backend that has a kernel for each."""


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
        super().__init__(group.group_id, device=device_of(caches), max_rows=max_rows, table_slots=table_slots)
        self._stride = group.entry_stride_tokens or 1
        self._scale = spec.scale
        self._latents = tuple(cache["latent"] for cache in caches if "latent" in cache)
        self._keys = tuple(cache["index_key"] for cache in caches if "index_key" in cache)
        self._window = group.sliding_window_tokens or 0
        self._longest_extend = 0
        self._lists: torch.Tensor | None = None
        if spec.visible:
            entries = self._window or table_slots * group.rows_per_block
            self._lists = torch.zeros(max_rows, entries, dtype=torch.int32, device=device_of(caches))
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

    def refresh_extend_metadata(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        *,
        forward_mode: ForwardMode,
        block_tables: Mapping[str, torch.Tensor],
        extend_seq_lens: torch.Tensor,
        extend_seq_lens_cpu: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_prefix_lens_cpu: torch.Tensor,
        extend_with_prefix: bool,
        query_shard: QueryShardPlan | None,
    ) -> None:
        """See the contract."""
        super().refresh_extend_metadata(
            bs,
            req_pool_indices,
            forward_mode=forward_mode,
            block_tables=block_tables,
            extend_seq_lens=extend_seq_lens,
            extend_seq_lens_cpu=extend_seq_lens_cpu,
            extend_prefix_lens=extend_prefix_lens,
            extend_prefix_lens_cpu=extend_prefix_lens_cpu,
            extend_with_prefix=extend_with_prefix,
            query_shard=query_shard,
        )
        self._longest_extend = int((extend_seq_lens_cpu + extend_prefix_lens_cpu).max()) if bs else 0

    def _list_visible(self, lists: torch.Tensor) -> torch.Tensor:
        """The lists of all tokens; those of decoding ones, where no others are, in ``lists``."""
        device = lists.device
        ends = []  # the position behind each token's own
        if self.extend_tokens:
            starts, tokens = self.query_start, self.extend_tokens
            behind = torch.repeat_interleave(self.extend.lengths - starts[1:], starts.diff(), output_size=tokens)
            ends.append(torch.arange(1, tokens + 1, dtype=torch.int32, device=device) + behind)
        if self.decode.count:
            ends.append(self.decode.lengths)
        if not ends:
            return lists[:0]
        stop = (torch.cat(ends).clamp(min=0) // self._stride).unsqueeze(1)
        first = (stop - self._window).clamp(min=0) if self._window else torch.zeros_like(stop)
        if self.extend_tokens:
            lists = torch.empty(stop.shape[0], self._widest(lists.shape[1]), dtype=torch.int32, device=device)
        else:
            lists = lists[: stop.shape[0]]
        torch.add(first, torch.arange(lists.shape[1], dtype=torch.int32, device=device), out=lists)
        return lists.masked_fill_(lists >= stop, -1)

    def _widest(self, most: int) -> int:
        """A bound on the entries that a token of this step sees, at least 1, ``most`` where nothing better is known:
        decoding rows' lengths are the device's, and are asked only where that is the host."""
        longest = self._longest_extend
        if self.decode.count:
            lengths = self.decode.lengths
            if lengths.device.type != "cpu":
                return most
            longest = max(longest, int(lengths.max()))
        return max(1, min(most, longest // self._stride))

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
