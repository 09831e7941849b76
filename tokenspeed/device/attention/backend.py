"""The contract every attention backend keeps.

There is one way to prepare a decode, for eager steps, capture and replay alike, and extend inputs have no defaults: a
default is a protocol nobody sees. A test walks the backends and fails on a default, on keyword catch-alls and on a
second arm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder


class ForwardMode(Enum):
    """What kind of rows a forward has."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class QueryShard:
    """One rank's share of the query tokens of a chunk: tokens ``start`` up to ``stop`` of each row's input."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class QueryShardPlan:
    """How the query tokens of a chunk are divided among context-parallel ranks, one shard a row."""

    rank: int
    world: int
    shards: tuple[QueryShard, ...]


class AttentionBackend(Protocol):
    """What the layers of one cache group ask. Backends read the cache and never write it.

    In a batch the tokens of extending rows come first, then those of decoding rows. A step refreshes the extending rows
    first and the decoding rows behind them. A backend has those of ``tokenspeed.layers.batch.Attention``'s methods that
    its layers call.
    """

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
        """Prepares the decoding rows of the next forward; the only way to do so.

        ``bs`` rows are computed, the first ``actual_bs`` are real: the others resolve to the null block and length 0.
        ``req_pool_indices`` int64 [actual_bs], ``seq_lens`` int32 [actual_bs] (with the token to be computed),
        ``block_tables``: group id to int32 [pool rows, slots]. What a graph captured keeps its addresses.
        """
        ...

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
        """Prepares the extending rows of the next forward; a forward without any passes empty slices.

        ``extend_seq_lens`` int32 [bs]: tokens computed in this forward; ``extend_prefix_lens`` int32 [bs]: tokens
        before them; each on the device and on the host. ``extend_with_prefix``: whether any row has a prefix.
        """
        ...


def device_of(caches: Sequence[Mapping[str, torch.Tensor]]) -> torch.device:
    """Where the caches of a group's layers lie, and with them all that its backend makes."""
    return next(field.device for cache in caches for field in cache.values())


class AttentionBackendConstructor(Protocol):
    """How the builder makes a backend for a cache group.

    ``spec`` is the model's word for how the group attends. ``caches`` are the fields of each of the group's layers,
    strided views of the arena. ``max_rows`` bounds the rows of a step, ``table_slots`` are those of a block table.
    """

    def __call__(
        self,
        kernels: KernelBinder,
        *,
        group: CacheGroupSpec,
        spec: AttentionSpec,
        caches: Sequence[Mapping[str, torch.Tensor]],
        max_rows: int,
        table_slots: int,
    ) -> AttentionBackend: ...
