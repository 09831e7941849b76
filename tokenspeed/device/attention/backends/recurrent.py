"""Layers with a state: no attention, but where each row of a batch has its state and where it leaves the next.

A state table has two slots, input and live (docs/design/cache-concepts.md): a forward goes on from the input where
there is one, else from the live block, and writes the live block.
"""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.backend import ForwardMode, QueryShardPlan, device_of
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import StateRows
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

OPERATIONS = ("recurrent.gated_delta",)
"""Of which any solution can compute for this backend that has a kernel for each."""

_INPUT, _LIVE = 0, 1


class Backend:
    """The rows of one state group, in memory that stays; views for decode sizes keep their addresses."""

    def __init__(
        self,
        kernels: KernelBinder,  # noqa: ARG002 - the contract has it
        *,
        group: CacheGroupSpec,
        spec: AttentionSpec,  # noqa: ARG002 - the contract has it
        caches: Sequence[Mapping[str, torch.Tensor]],
        max_rows: int,
        table_slots: int,  # noqa: ARG002 - the contract has it
    ) -> None:
        self._group_id = group.group_id
        starts, sources, targets = (
            torch.zeros(count, dtype=torch.int32, device=device_of(caches))
            for count in (max_rows + 1, max_rows, max_rows)
        )
        self._starts, self._sources, self._targets = starts, sources, targets
        self._made: dict[int, StateRows] = {}
        self._extends = 0
        self._tokens = 0
        self.state_rows = self._views(0)

    def _views(self, rows: int) -> StateRows:
        if rows not in self._made:
            self._made[rows] = StateRows(self._starts[: rows + 1], self._sources[:rows], self._targets[:rows])
        return self._made[rows]

    def refresh_decode_metadata(
        self,
        bs: int,
        actual_bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,  # noqa: ARG002 - the contract has it
        *,
        forward_mode: ForwardMode,  # noqa: ARG002 - the contract has it
        block_tables: Mapping[str, torch.Tensor],
        for_graph_replay: bool,  # noqa: ARG002 - the contract has it
    ) -> None:
        """See the contract; behind the extending rows, which were refreshed before."""
        first, total = self._extends, self._extends + bs
        torch.arange(
            self._tokens + 1, self._tokens + bs + 1, dtype=torch.int32, out=self._starts[first + 1 : total + 1]
        )
        self._fill(first, req_pool_indices, block_tables[self._group_id])
        self._sources[first + actual_bs : total] = 0
        self._targets[first + actual_bs : total] = 0
        self.state_rows = self._views(total)

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
        """See the contract. Raises ValueError for a query shard: a state goes through all tokens of a row."""
        if query_shard is not None:
            raise ValueError("a state cannot divide the tokens of a row among ranks; run with context parallel size 1")
        self._extends = bs
        self._tokens = int(extend_seq_lens_cpu.sum()) if bs else 0
        if bs:
            torch.cumsum(extend_seq_lens, 0, dtype=torch.int32, out=self._starts[1 : bs + 1])
            self._fill(0, req_pool_indices, block_tables[self._group_id])
            self._sources[:bs].masked_fill_(extend_prefix_lens == 0, 0)
        self.state_rows = self._views(bs)

    def _fill(self, first: int, rows: torch.Tensor, table: torch.Tensor) -> None:
        """Sources and targets of the pool rows ``rows``, from batch row ``first`` on."""
        held = table[rows]
        source, live = held[:, _INPUT], held[:, _LIVE]
        self._targets[first : first + rows.shape[0]] = live
        self._sources[first : first + rows.shape[0]] = torch.where(source > 0, source, live)
