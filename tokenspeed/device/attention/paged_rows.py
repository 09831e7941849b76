"""Where the rows of a batch have their pages: what every backend over a history keeps, in memory that stays."""

from collections.abc import Mapping

import torch

from tokenspeed.device.attention.backend import ForwardMode, QueryShardPlan


class PagedRows:
    """The extending and the decoding rows of one history group; the two refreshes of the contract.

    Page tables (for history groups of one entry a token a block is a page) and lengths for ``max_rows`` rows, and the
    first query of each extending row. Views for a number of rows are made once and keep their addresses.

    Attributes:
        decode: the decoding rows.
        extend: the extending rows.
        extend_tokens: tokens of all extending rows.
    """

    def __init__(self, group_id: str, *, device: torch.device, max_rows: int, table_slots: int) -> None:
        self._group_id = group_id
        self.decode = Rows(device, max_rows, table_slots)
        self.extend = Rows(device, max_rows, table_slots)
        self.extend_tokens = 0
        self._query_start = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._one_each = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    @property
    def query_start(self) -> torch.Tensor:
        """int32 [extending rows + 1]: the first query of each."""
        return self._query_start[: self.extend.count + 1]

    def _kinds(self) -> list[tuple[slice, "Rows", torch.Tensor]]:
        """The tokens, the rows and the first token of each row, int32 [rows + 1]: of the extending rows, where there
        are any, and of the decoding ones behind them."""
        tokens = self.extend_tokens
        found = [(slice(0, tokens), self.extend, self.query_start)] if tokens else []
        if self.decode.count:
            found.append((slice(tokens, None), self.decode, self._one_each[: self.decode.count + 1]))
        return found

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
        self.decode.fill(bs, actual_bs, req_pool_indices, seq_lens, block_tables[self._group_id])

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
                "paged attention cannot divide the queries of a row among ranks; run with context parallel size 1"
            )
        self.extend.count = bs
        self.extend_tokens = int(extend_seq_lens_cpu.sum()) if bs else 0
        if bs:
            seq_lens = extend_prefix_lens + extend_seq_lens
            self.extend.fill(bs, bs, req_pool_indices, seq_lens, block_tables[self._group_id])
            torch.cumsum(extend_seq_lens, 0, dtype=torch.int32, out=self._query_start[1 : bs + 1])


class Rows:
    """Page table int32 [rows, slots] and lengths int32 [rows] of one kind of rows.

    Attributes:
        count: rows that are filled.
        pages, lengths: views of them.
    """

    def __init__(self, device: torch.device, max_rows: int, table_slots: int) -> None:
        self._pages = torch.zeros(max_rows, table_slots, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.count = 0
        self.pages, self.lengths = self._views(0)

    def _views(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rows not in self._made:
            self._made[rows] = self._pages[:rows], self._seq_lens[:rows]
        return self._made[rows]

    def fill(self, bs: int, actual_bs: int, rows: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> None:
        """Real rows first; the rest up to ``bs`` is the null block with length 0."""
        self.count = bs
        self.pages, self.lengths = pages, lengths = self._views(bs)
        if actual_bs != bs:
            pages[actual_bs:] = 0
            lengths[actual_bs:] = 0
            pages, lengths = self._views(actual_bs)
        if actual_bs:
            torch.index_select(table, 0, rows, out=pages)
            lengths.copy_(seq_lens)
