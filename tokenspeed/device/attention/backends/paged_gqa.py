"""Grouped-query attention over paged keys and values, by whatever kernels the registry chose."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.backend import ForwardMode, QueryShardPlan
from tokenspeed.layers.kernels import KernelBinder


class Backend:
    """Decode and extend for one full_history or sliding_window group.

    Persistent metadata for ``max_rows`` rows: page tables (for history groups of one entry a token a block is a page),
    lengths, and the first query of each extending row. Views for a number of rows are made once and keep their
    addresses. ``caches`` are each layer's keys and values [blocks, kv heads, granularity, head_dim]. With a ``window``
    the kernels read no block that lies before it, so its entry in the block table may be null.
    """

    def __init__(
        self,
        kernels: KernelBinder,
        *,
        group_id: str,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        num_heads: int,
        window: int,
        max_rows: int,
        table_slots: int,
    ) -> None:
        _, kv_heads, granularity, head_dim = caches[0][0].shape
        self._group_id = group_id
        self._caches = tuple(caches)
        self._scale = head_dim**-0.5
        self._window = window
        self._decode, self._extend = (
            kernels.attention_read(
                mode,
                head_dim=head_dim,
                q_per_kv=num_heads // kv_heads,
                page=granularity,
                windowed=window > 0,
                kv_dtype=caches[0][0].dtype,
            )
            for mode in ("decode", "extend")
        )
        self._decode_rows = _Rows(max_rows, table_slots)
        self._extend_rows = _Rows(max_rows, table_slots)
        self._query_start = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._decode_bs = 0
        self._extend_bs = 0
        self._extend_tokens = 0

    def refresh_decode_metadata(
        self,
        bs: int,
        actual_bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        forward_mode: ForwardMode,  # noqa: ARG002 - the contract has it
        block_tables: Mapping[str, torch.Tensor],
        for_graph_replay: bool,  # noqa: ARG002 - the contract has it
    ) -> None:
        """See the contract; one preparation, whatever ``forward_mode`` and ``for_graph_replay`` say."""
        self._decode_bs = bs
        self._decode_rows.fill(bs, actual_bs, req_pool_indices, seq_lens, block_tables[self._group_id])

    def refresh_extend_metadata(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        *,
        forward_mode: ForwardMode,  # noqa: ARG002 - the contract has it
        block_tables: Mapping[str, torch.Tensor],
        extend_seq_lens: torch.Tensor,
        extend_seq_lens_cpu: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_prefix_lens_cpu: torch.Tensor,  # noqa: ARG002 - the contract has it
        extend_with_prefix: bool,  # noqa: ARG002 - the contract has it
        query_shard: QueryShardPlan | None,
    ) -> None:
        """See the contract. Raises ValueError for a query shard: these kernels compute all queries of a row."""
        if query_shard is not None:
            raise ValueError(
                "paged_gqa cannot divide the queries of a row among ranks; run with context parallel size 1"
            )
        self._extend_bs = bs
        self._extend_tokens = int(extend_seq_lens_cpu.sum()) if bs else 0
        if bs:
            seq_lens = extend_prefix_lens + extend_seq_lens
            self._extend_rows.fill(bs, bs, req_pool_indices, seq_lens, block_tables[self._group_id])
            torch.cumsum(extend_seq_lens, 0, dtype=torch.int32, out=self._query_start[1 : bs + 1])

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Extending rows first, then decoding rows; q float32 [T, heads, head_dim], rows may be apart."""
        k_cache, v_cache = self._caches[layer]
        tokens = self._extend_tokens
        if tokens:
            pages, seq_lens = self._extend_rows.views
            starts = self._query_start[: self._extend_bs + 1]
            self._extend(q[:tokens], k_cache, v_cache, pages, starts, seq_lens, self._scale, self._window, out[:tokens])
            q, out = q[tokens:], out[tokens:]
        if self._decode_bs:
            pages, seq_lens = self._decode_rows.views
            self._decode(q, k_cache, v_cache, pages, seq_lens, self._scale, self._window, out)


class _Rows:
    """Page table int32 [rows, slots] and lengths int32 [rows] of one kind of rows, in memory that stays."""

    def __init__(self, max_rows: int, table_slots: int) -> None:
        self._pages = torch.zeros(max_rows, table_slots, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_rows, dtype=torch.int32)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.views = self._views(0)

    def _views(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rows not in self._made:
            self._made[rows] = self._pages[:rows], self._seq_lens[:rows]
        return self._made[rows]

    def fill(self, bs: int, actual_bs: int, rows: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> None:
        """Real rows first; the rest up to ``bs`` is the null block with length 0."""
        self.views = pages, lengths = self._views(bs)
        if actual_bs != bs:
            pages[actual_bs:] = 0
            lengths[actual_bs:] = 0
            pages, lengths = self._views(actual_bs)
        if actual_bs:
            torch.index_select(table, 0, rows, out=pages)
            lengths.copy_(seq_lens)
