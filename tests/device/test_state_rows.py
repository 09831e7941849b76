"""Where the rows of a batch have their state: the input block where there is one, else the live one, else nowhere."""

import torch
from refresh import decode, extend

from tokenspeed.device.attention.backends.recurrent import Backend
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import StateRows
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

TABLES = torch.tensor([[0, 0, 0], [0, 2, 0], [4, 5, 0], [7, 8, 0]], dtype=torch.int32)
"""Pool row 1 goes on in place, rows 2 and 3 from a checkpoint."""


def make() -> Backend:
    fields = (CacheFieldSpec(name="state", heads=2, dim=4),)
    group = CacheGroupSpec(group_id="g", kind="state", layers=(0,), fields=fields, checkpoint_granularity=64)
    spec = AttentionSpec(backend="recurrent")
    caches = [{"state": torch.zeros(2, 2, 1, 4)}]
    return Backend(KernelBinder({}), group=group, spec=spec, caches=caches, max_rows=4, table_slots=3)


def lists(rows: StateRows) -> tuple[list[int], list[int], list[int]]:
    return rows.starts.tolist(), rows.sources.tolist(), rows.targets.tolist()


def test_extending_rows_come_before_decoding_rows() -> None:
    backend = make()
    extend(backend, TABLES, [3, 1], [5, 20], [64, 0])
    decode(backend, TABLES, [2], [33], 1)
    assert lists(backend.state_rows) == ([0, 5, 25, 26], [7, 0, 4], [8, 2, 5])


def test_a_row_without_a_prefix_begins_with_nothing() -> None:
    backend = make()
    extend(backend, TABLES, [1], [3], [0])
    decode(backend, TABLES, [], [], 0)
    assert lists(backend.state_rows) == ([0, 3], [0], [2])
    extend(backend, TABLES, [1], [3], [3])
    decode(backend, TABLES, [], [], 0)
    assert lists(backend.state_rows) == ([0, 3], [2], [2])


def test_padded_rows_have_no_state() -> None:
    backend = make()
    extend(backend, TABLES, [], [], [])
    decode(backend, TABLES, [1, 2, 3], [9, 9, 9], 3)
    decode(backend, TABLES, [2], [9], 3)
    assert lists(backend.state_rows) == ([0, 1, 2, 3], [4, 0, 0], [5, 0, 0])


def test_decode_sizes_keep_their_addresses() -> None:
    """What a graph captures for a batch size must be what a later refresh fills."""
    backend = make()
    extend(backend, TABLES, [], [], [])
    decode(backend, TABLES, [1, 2], [3, 4], 2)
    first = backend.state_rows
    extend(backend, TABLES, [3], [4], [0])
    decode(backend, TABLES, [], [], 0)
    extend(backend, TABLES, [], [], [])
    decode(backend, TABLES, [3, 1], [9, 8], 2)
    assert backend.state_rows is first
    assert lists(first) == ([0, 1, 2], [7, 2], [8, 2])
