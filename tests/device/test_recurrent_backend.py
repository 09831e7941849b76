"""Where the rows of a batch have their states: the input where there is one, else the live block."""

import pytest
import torch

from tokenspeed.device.attention.backend import ForwardMode, QueryShard, QueryShardPlan
from tokenspeed.device.attention.backends import backend_class
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

GROUP = CacheGroupSpec(
    group_id="state",
    kind="state",
    layers=(0,),
    fields=(CacheFieldSpec(name="matrix", heads=1, dim=4),),
    dtype="float32",
    checkpoint_granularity=64,
)
# Input and live block of each pool row; the null row has none.
TABLE = torch.tensor([[0, 0, 9], [0, 3, 9], [5, 4, 9], [0, 6, 9], [7, 8, 9]], dtype=torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Rows:
    """A backend with extending and decoding rows of the table above."""

    def __init__(self) -> None:
        self.backend = backend_class("recurrent")(
            KernelBinder({}),
            group=GROUP,
            spec=AttentionSpec(backend="recurrent"),
            caches=[{"matrix": torch.zeros(10, 1, 1, 4)}],
            max_rows=4,
            table_slots=3,
        )

    def extend(self, rows: list[int], lengths: list[int], prefixes: list[int], shard: object = None) -> None:
        self.backend.refresh_extend_metadata(
            len(rows),
            torch.tensor(rows, dtype=torch.int64),
            forward_mode=ForwardMode.EXTEND,
            block_tables={"state": TABLE},
            extend_seq_lens=ints(*lengths),
            extend_seq_lens_cpu=ints(*lengths),
            extend_prefix_lens=ints(*prefixes),
            extend_prefix_lens_cpu=ints(*prefixes),
            extend_with_prefix=any(prefixes),
            query_shard=shard,  # type: ignore[arg-type]
        )

    def decode(self, rows: list[int], padded: int = 0) -> None:
        self.backend.refresh_decode_metadata(
            len(rows) + padded,
            len(rows),
            torch.tensor(rows, dtype=torch.int64),
            ints(*[9] * len(rows)),
            forward_mode=ForwardMode.DECODE,
            block_tables={"state": TABLE},
            for_graph_replay=False,
        )

    @property
    def now(self) -> list[list[int]]:
        rows = self.backend.state_rows  # type: ignore[attr-defined]
        return [rows.starts.tolist(), rows.sources.tolist(), rows.targets.tolist()]


def test_extending_rows_begin_with_nothing_a_checkpoint_or_where_they_were() -> None:
    rows = Rows()
    rows.extend([1, 2, 3], [5, 1, 7], [0, 64, 12])
    rows.decode([])
    assert rows.now == [[0, 5, 6, 13], [0, 5, 6], [3, 4, 6]]


def test_a_first_chunk_ignores_what_its_blocks_held() -> None:
    """An input without a prefix cannot be: the row begins with zeros whatever its table holds."""
    rows = Rows()
    rows.extend([4], [3], [0])
    assert rows.now == [[0, 3], [0], [8]]


def test_decoding_rows_come_behind_extending_ones_and_padding_is_nobodys() -> None:
    rows = Rows()
    rows.extend([1], [4], [0])
    rows.decode([2, 3], padded=1)
    assert rows.now == [[0, 4, 5, 6, 7], [0, 5, 6, 0], [3, 4, 6, 0]]


def test_padding_is_nobodys_where_others_were_before() -> None:
    rows = Rows()
    rows.extend([], [], [])
    rows.decode([1, 2, 3])
    rows.decode([2], padded=2)
    assert rows.now == [[0, 1, 2, 3], [5, 0, 0], [4, 0, 0]]


def test_decode_sizes_keep_their_memory_and_forget_rows_before() -> None:
    rows = Rows()
    rows.extend([], [], [])
    rows.decode([1, 2, 3])
    first = rows.backend.state_rows  # type: ignore[attr-defined]
    rows.extend([2], [9], [64])
    rows.decode([1])
    rows.extend([], [], [])
    rows.decode([3, 1, 2])
    again = rows.backend.state_rows  # type: ignore[attr-defined]
    for one, other in zip(
        (first.starts, first.sources, first.targets), (again.starts, again.sources, again.targets), strict=True
    ):
        assert one.data_ptr() == other.data_ptr()
    assert rows.now == [[0, 1, 2, 3], [6, 3, 5], [6, 3, 4]]
    rows.decode([])
    assert rows.now == [[0], [], []]


def test_a_share_of_a_rows_tokens_is_refused() -> None:
    shard = QueryShardPlan(rank=0, world=2, shards=(QueryShard(start=0, stop=1),))
    with pytest.raises(ValueError, match="context parallel size 1"):
        Rows().extend([1], [2], [0], shard)
