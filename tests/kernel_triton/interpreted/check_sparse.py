"""Sparse and compressed attention by Triton's interpreter against the references."""

import pytest
import torch

from tokenspeed_kernel.ops.compressed import reference_apply_sinks, reference_compress, reference_write
from tokenspeed_kernel.ops.sparse import reference_index_prologue, reference_index_select, reference_mla_selected
from tokenspeed_kernel_triton import entries, sparse

PAGE = 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def cache_of(rows, pages, width, dtype=torch.float32):
    """A cache, strided, with NaN in its null block, and a page table in which no block lies where it is expected."""
    whole = torch.randn(rows * pages + 1, 2, 1, PAGE, width).to(dtype)
    whole[0] = torch.nan
    table = 1 + torch.randperm(rows * pages).view(rows, pages).to(torch.int32)
    return whole[:, 1], table


@pytest.mark.parametrize(
    ("stride", "k"), [(1, 5), pytest.param(4, 3, marks=pytest.mark.long), pytest.param(1, 70, marks=pytest.mark.long)]
)
def test_the_same_entries_are_chosen_ties_and_nan_included(stride, k):
    """Rows without queries, a query that sees less than it may choose, equal scores, tokens of nobody at both ends."""
    cache, table = cache_of(3, 20, 16)
    starts, lens = ints(1, 4, 4, 6), ints(60, 9, 7)
    q, weights = torch.randn(8, 3, 16), torch.randn(8, 3)
    q[2] = 0.0  # all scores are equal
    cache[table[0, 0], 0, 2, 0] = torch.nan
    found, expected = torch.full((2, 8, k), 77, dtype=torch.int32)
    read = (q, weights, cache, table, starts, lens, stride)
    reference_index_select(*read, expected)
    sparse.index_select(*read, found)
    assert torch.equal(found, expected)
    assert bool((found[0] == 77).all()) and bool((found[6:] == 77).all())


@pytest.mark.long
def test_queries_are_taken_in_parts_where_their_scores_would_not_fit(monkeypatch):
    cache, table = cache_of(2, 6, 16)
    read = (torch.randn(9, 2, 16), torch.randn(9, 2), cache, table, ints(0, 5, 9), ints(24, 20), 1)
    found, expected = torch.empty((2, 9, 4), dtype=torch.int32)
    reference_index_select(*read, expected)
    monkeypatch.setattr(sparse, "SCORES_BYTES", 4 * 6 * PAGE * 4)
    sparse.index_select(*read, found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("splits", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 7, 64))])
@pytest.mark.parametrize("rotary", [6, 0])
def test_selected_entries_are_attended_to(splits, rotary):
    """Any number of splits; a query that selected nothing, one of nobody, more heads than a tile has rows."""
    heads, latent, k = 70 if splits == 1 else 5, 32, 13
    cache, table = cache_of(2, 8, latent + rotary)
    selected = torch.full((7, k), -1, dtype=torch.int32)
    for query in (0, 1, 3, 4):
        count = (13, 5, 0, 1, 9)[query]
        selected[query, :count] = torch.randperm(30)[:count].sort().values.to(torch.int32)
    q = torch.randn(7, heads, latent + rotary)
    read = (q[..., :latent], q[..., latent:], cache, table, ints(0, 2, 5), selected, 0.2)
    results = []
    for fn in (reference_mla_selected, lambda *call: sparse.attend_selected(*call, rounded=False, splits=splits)):
        out, lse = torch.full((7, heads, latent), 7.0), torch.full((7, heads), 7.0)
        fn(*read, out, lse)
        results.append((out, lse))
    torch.testing.assert_close(results[1], results[0], rtol=3e-6, atol=3e-6)
    out, lse = results[1]
    assert bool((out[5:] == 7.0).all()) and bool((lse[5:] == 7.0).all())
    assert not out[2].any() and bool(torch.isneginf(lse[2]).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_rounded_queries_over_selected_entries(dtype):
    cache, table = cache_of(1, 8, 40, dtype)
    selected = torch.arange(0, 30, 2, dtype=torch.int32).expand(2, -1).contiguous()
    q, (found, expected) = torch.randn(2, 4, 40), torch.empty(2, 2, 4, 32)
    read = (q[..., :32], q[..., 32:], cache, table, ints(0, 2), selected, 0.2)
    reference_mla_selected(*read, expected, None)
    sparse.rounded_mla_selected(*read, found, None)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "turned"), [(20, 12), (16, 16)])
def test_the_prologue_of_an_indexer(dtype, width, turned):
    q, key = torch.randn(3, 2 * width + 3)[:, : 2 * width].view(3, 2, width), torch.randn(3, width + 2)[:, :width]
    caches = torch.zeros(2, 4, 1, PAGE, width, dtype=dtype)
    norms, angles = torch.randn(2, width), torch.randn(9, turned)
    found = []
    for fn, cache in ((reference_index_prologue, caches[0]), (entries.index_prologue, caches[1])):
        own = q.clone()
        fn(own, key.clone(), ints(8, 0, 2), angles, *norms, 1e-5, cache, torch.tensor([6, -1, 15]))
        found.append(own)
    torch.testing.assert_close(found[1], found[0], rtol=3e-6, atol=3e-6)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(caches[1][1:].float(), caches[0][1:].float(), rtol=bound, atol=bound)
    assert not caches[1][2].any()


@pytest.mark.parametrize(("stride", "overlapping"), [(2, True), (3, False)])
def test_tokens_are_compressed_into_entries(stride, overlapping):
    """A first entry has nothing before it; entries that end in another call, or in padding, are left alone."""
    width, rotary = 11, 6
    columns = 2 * width if overlapping else width
    (values, table), (gates, _) = cache_of(2, 8, columns), cache_of(2, 8, columns)
    bias, norm, angles = torch.randn(stride, columns), torch.randn(width), torch.randn(40, rotary)
    slots = torch.tensor([-1, *range(stride * PAGE, stride * PAGE + 11)])
    slots[5] = 3
    caches = torch.full((2, 3 + 12 // PAGE, 1, PAGE, width), 5.0)
    for fn, cache in ((reference_compress, caches[0]), (entries.compress, caches[1])):
        read = (values, gates, table, ints(1, 7, 7, 11)[[0, 1, 3]], ints(6, 23))
        fn(*read, bias, norm, 1e-6, angles, cache, slots, overlapping)
    torch.testing.assert_close(caches[1][1:], caches[0][1:], rtol=1e-5, atol=1e-5)
    assert bool((caches[1][1:] != 5.0).any())


def test_rows_are_written_and_sinks_applied():
    x, caches = torch.randn(3, 1031)[:, :1030], torch.zeros(2, 4, 1, PAGE, 1030, dtype=torch.float16)
    for fn, cache in ((reference_write, caches[0]), (entries.write, caches[1])):
        fn(x, cache, torch.tensor([9, -3, 4]))
    assert torch.equal(caches[1][1:], caches[0][1:])
    heads, lse, sinks = torch.randn(2, 3, 20), torch.randn(2, 3) * 50.0, torch.randn(3) * 50.0
    lse[1, 1] = -torch.inf
    expected = heads.clone()
    reference_apply_sinks(expected, lse, sinks)
    entries.apply_sinks(heads, lse, sinks)
    torch.testing.assert_close(heads, expected, rtol=2e-6, atol=1e-7)
    assert not heads[1, 1].any()


def test_calls_without_rows_launch_nothing():
    cache, table = cache_of(1, 2, 16)
    nothing = torch.empty(0, 2, 16)
    chosen = torch.empty(0, 3, dtype=torch.int32)
    sparse.index_select(nothing, nothing[..., 0], cache, table[:0], ints(0), ints(), 1, chosen)
    sparse.mla_selected(nothing, nothing[..., :0], cache, table[:0], ints(0), chosen, 1.0, nothing, None)
    entries.write(nothing[:, 0], cache, torch.empty(0, dtype=torch.int64))
