"""Block tables: deltas in order make the table; anything out of step is fatal and says why."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_maker import Delta, ints

from tokenspeed.device.attention.slots import write_slots
from tokenspeed.device.block_tables import BlockTableMismatch, BlockTables
from tokenspeed.device.placement import HOST


def make() -> BlockTables:
    return BlockTables(HOST, group_id="attention", num_rows=4, num_slots=5, num_blocks=50)


def delta(row: int, first: int, ids: list[int], version: int, to: int | None = None, count: int | None = None) -> Delta:
    return Delta(
        row=ints([row]),
        first_slot=ints([first]),
        count=ints([len(ids) if count is None else count]),
        version_from=ints([version]),
        version_to=ints([version + 1 if to is None else to]),
        ids=ints(ids),
    )


def test_growing_replacing_and_cutting() -> None:
    tables = make()
    tables.apply(delta(2, 0, [7, 8, 9], 0))
    tables.apply(delta(2, 3, [10], 1))
    assert tables.ids[2].tolist() == [7, 8, 9, 10, 0]
    tables.apply(delta(2, 1, [20], 2))
    assert tables.ids[2].tolist() == [7, 20, 0, 0, 0]
    assert tables.tensor[2].tolist() == [7, 20, 0, 0, 0]


def test_a_row_begins_again_empty_and_at_version_0() -> None:
    tables = make()
    tables.apply(delta(1, 0, [3, 4], 0))
    tables.begin(1)
    assert tables.ids[1].tolist() == [0] * 5
    tables.apply(delta(1, 0, [5], 0))
    assert tables.ids[1].tolist() == [5, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (delta(1, 1, [5], 0), r"row 1: a delta from version 0 to 1 came, the table has version 1"),
        (delta(1, 1, [5], 2), r"a delta from version 2 to 3 came, the table has version 1"),
        (delta(1, 1, [5], 1, to=3), r"goes from version 1 to 3, not one further"),
        (delta(1, 2, [5], 1), r"sets slots 2 to 2, the table has 1 slots"),
        (delta(1, 1, [5] * 5, 1), r"room for 5"),
        (delta(0, 0, [5], 0), r"row 0: there are rows 1 to 3"),
        (delta(4, 0, [5], 0), r"row 4: there are rows 1 to 3"),
        (delta(1, 1, [50], 1), r"blocks are 0 to 49"),
        (delta(1, 1, [-1], 1), r"blocks are 0 to 49"),
        (delta(1, 1, [5], 1, count=2), r"2 ids announced"),
    ],
)
def test_what_does_not_fit_is_fatal(change: Delta, words: str) -> None:
    tables = make()
    tables.apply(delta(1, 0, [3], 0))
    with pytest.raises(BlockTableMismatch, match=words):
        tables.apply(change)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.lists(st.integers(1, 49), max_size=4)), max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_deltas_gives_what_plain_lists_give(changes: list[tuple[int, int, list[int]]]) -> None:
    tables, plain, versions = make(), {row: [] for row in range(4)}, dict.fromkeys(range(4), 0)
    for row, first, ids in changes:
        if first > len(plain[row]) or first + len(ids) > 5:
            continue
        tables.apply(delta(row, first, ids, versions[row]))
        versions[row] += 1
        plain[row] = plain[row][:first] + ids
    for row, blocks in plain.items():
        assert tables.ids[row].tolist() == blocks + [0] * (5 - len(blocks))


@given(st.integers(1, 64), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_slot_rule(granularity: int, tokens: list[tuple[int, int]]) -> None:
    table = np.arange(4 * 501, dtype=np.int32).reshape(4, 501)
    rows = np.array([row for row, _ in tokens])
    positions = ints([position for _, position in tokens])
    out = np.full(len(tokens), -7, np.int64)
    write_slots(table, rows, positions, granularity, out)
    expected = [int(table[r, p // granularity]) * granularity + p % granularity for r, p in tokens]
    assert out.tolist() == expected


def test_slots_of_large_caches_do_not_overflow() -> None:
    table, out = np.full((1, 1), 2**31 - 1, np.int32), np.zeros(1, np.int64)
    write_slots(table, np.zeros(1, np.intp), ints([3]), 64, out)
    assert out[0] == (2**31 - 1) * 64 + 3
