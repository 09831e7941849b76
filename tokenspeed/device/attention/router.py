"""Attention of a model whose layers lie in several cache groups: one backend a group, behind the contract of one."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.backend import AttentionBackend, ForwardMode, QueryShardPlan
from tokenspeed.layers.cache_spec import CacheGroupSpec, group_of_layers


class GroupRouter:
    """Prepares every group's backend and sends each of the model's layers to its own group's.

    ``backends`` are in the order of ``groups``. ``attend`` takes the index of a layer of the model.
    """

    def __init__(self, groups: Sequence[CacheGroupSpec], backends: Sequence[AttentionBackend]) -> None:
        self._backends = tuple(backends)
        self._routes = tuple(
            (backends[group].attend, groups[group].layers.index(layer))
            for layer, group in enumerate(group_of_layers(groups))
        )

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
        """See the contract; each backend takes its group's table."""
        for backend in self._backends:
            backend.refresh_decode_metadata(
                bs,
                actual_bs,
                req_pool_indices,
                seq_lens,
                forward_mode=forward_mode,
                block_tables=block_tables,
                for_graph_replay=for_graph_replay,
            )

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
        """See the contract; each backend takes its group's table."""
        for backend in self._backends:
            backend.refresh_extend_metadata(
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

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the model's layer ``layer``, by the backend of its group."""
        attend, place = self._routes[layer]
        attend(place, q, out)


def attention_of(groups: Sequence[CacheGroupSpec], backends: Sequence[AttentionBackend]) -> AttentionBackend:
    """The attention of a model with these groups: the one backend itself, or a router over several."""
    if len(groups) == 1 and groups[0].layers == tuple(range(len(groups[0].layers))):
        return backends[0]
    return GroupRouter(groups, backends)
