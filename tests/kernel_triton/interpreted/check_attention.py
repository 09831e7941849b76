"""Attention by Triton's interpreter against the references: splits, folding, workspace, windows, sinks, far blocks."""

import itertools
import math

import pytest
import torch

from tokenspeed_kernel.numerics.paged import far_pages, scatter_pages
from tokenspeed_kernel.ops.attention import reference_decode, reference_extend
from tokenspeed_kernel.ops.merge import reference_merge_partials
from tokenspeed_kernel.ops.mla import reference_mla_decode, reference_mla_decode_partial, reference_mla_extend
from tokenspeed_kernel.ops.mla_tiling import fold_queries, fold_sq_factor, partial_workspace_bytes
from tokenspeed_kernel.ops.paged_reference import ScoreRules, attend_row
from tokenspeed_kernel_triton import attention, paged_attention
from tokenspeed_kernel_triton.configs import SHARED_MEMORY
from tokenspeed_kernel_triton.device import compiling_for
from tokenspeed_kernel_triton.paged_attention import Reads

PAGE, LATENT, ROTARY = 8, 32, 6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def pages_of(heads, width, *seq_lens, fields=2, dtype=torch.float32, page=PAGE):
    """Caches [blocks, heads, page, width] and a page table; NaN wherever no row has a position."""
    pages = scatter_pages(
        (fields, heads, page, width), seq_lens, [0] * len(seq_lens), torch.float32, torch.Generator().manual_seed(1)
    )
    arena = pages.arena.to(dtype)
    return arena[:, 0], arena[:, -1], pages.tables


def close(found, expected, bound=2e-6):
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("splits", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 3, 7, 64))])
def test_any_split_count_gives_the_same_attention_and_lse(splits):
    """Rows of no, one, a page and many positions; most splits of most rows are empty."""
    k_cache, v_cache, table = pages_of(1, 48, 0, 1, 8, 150)
    q = torch.randn(4, 3, 48)
    expected, expected_lse = torch.empty(4, 3, 48), torch.empty(4, 3)
    for row, length in enumerate((0, 1, 8, 150)):
        found = attend_row(q[row : row + 1], k_cache, v_cache, table[row], length, ScoreRules(0.2))
        expected[row], expected_lse[row] = found[0][0], found[1][0]
    out, lse = torch.full_like(q, torch.nan), torch.full((4, 3), torch.nan)
    reads = Reads(k_cache, v_cache, table, None, lens(0, 1, 8, 150), 0.2)
    paged_attention.attend(q, None, reads, out, lse, splits)
    close(out, expected)
    close(lse, expected_lse)
    assert not out[0].any() and bool(torch.isneginf(lse[0]).all())


@pytest.mark.long
@pytest.mark.parametrize(("window", "cap", "sunk"), [(0, 0.0, True), (5, 0.0, True), (19, 3.0, False), (1, 0.0, False)])
@pytest.mark.parametrize("splits", [1, 3])
def test_windows_sinks_and_caps_survive_splitting(window, cap, sunk, splits):
    k_cache, v_cache, table = pages_of(2, 16, 70, 3, 0)
    q, out, expected = (torch.randn(6, 4, 16) for _ in range(3))
    sinks = torch.randn(4) * 3.0 if sunk else None
    read = (table, lens(70, 3, 0), 0.3, window)
    reference_decode(q, k_cache, v_cache, *read, expected, sinks, cap)
    reads = Reads(k_cache, v_cache, table, None, lens(70, 3, 0), 0.3, window, sinks, cap)
    paged_attention.attend(q, None, reads, out, None, splits)
    close(out, expected)


@pytest.mark.long
@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
def test_the_tiles_of_every_architecture_extend_alike(architecture):
    """Empty rows, rows without queries, more queries than positions, rows of out that are nobody's."""
    k_cache, v_cache, table = pages_of(2, 20, 7, 0, 9, 60, 3)
    starts, seq_lens = lens(0, 7, 7, 8, 31, 35), lens(7, 0, 9, 60, 3)
    q, expected = torch.randn(37, 6, 20), torch.full((37, 6, 20), 7.0)
    out = expected.clone()
    reference_extend(q, k_cache, v_cache, table, starts, seq_lens, 0.25, 0, expected)
    with compiling_for(architecture):
        attention.extend(q, k_cache, v_cache, table, starts, seq_lens, 0.25, 0, out)
    close(out, expected)


@pytest.mark.long
@pytest.mark.parametrize(("heads", "width"), [(128, 1), (48, 2), (20, 3), (16, 4), (5, 7)])
def test_latent_decode_with_every_fold_factor(heads, width):
    """Heads that fill tiles, that share them between tokens, that need several; a row shorter than its queries."""
    cache, _, table = pages_of(1, LATENT + ROTARY, 40, width - 1, fields=1)
    q, out, expected = torch.randn(2 * width, heads, LATENT + ROTARY), *torch.empty(2, 2 * width, heads, LATENT)
    lse, expected_lse = torch.empty(2, 2 * width, heads)
    parts = q[..., :LATENT], q[..., LATENT:]
    read = (cache, table, lens(40, width - 1), 0.2)
    reference_mla_decode(*parts, *read, expected, expected_lse)
    attention.mla_decode(*parts, *read, out, lse)
    close(out, expected)
    close(lse, expected_lse)


def test_folding_is_a_view_and_a_tile_reads_its_rows():
    """The rows of a tile are those of the folded view, which is the same memory."""
    heads, width = 8, 6
    q = torch.randn(2 * width, heads, LATENT + ROTARY)
    cut = paged_attention.cut_queries(
        2 * width, 2, heads, True, tile=paged_attention.attention_tile("latent", "sm_90", 512, True)
    )
    assert cut.tokens == fold_sq_factor(heads, width, cut.tile.rows) == 6
    folded = fold_queries(q, width, cut.tokens)
    assert folded.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    assert folded.shape == (2, 1, 48, LATENT + ROTARY)
    assert cut.rows == 64 and cut.tiles == 2
    member = torch.arange(48)
    assert torch.equal(folded[1, 0], q[width + member // heads, member % heads])


@pytest.mark.parametrize("splits", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 5, 11))])
def test_latent_partials_follow_the_contract_and_merge(splits):
    """Split s takes the pages that the contract gives it; what is empty is exactly zeros and -inf."""
    cache, _, table = pages_of(1, LATENT + ROTARY, 50, 9, 0, fields=1)
    q = torch.randn(3, 4, LATENT + ROTARY)
    parts, read = (q[..., :LATENT], q[..., LATENT:]), (cache, table, lens(50, 9, 0), 0.3)
    shape = (splits, 3, 4)
    expected, expected_lse = torch.empty(*shape, LATENT), torch.empty(shape)
    out, lse = torch.full((*shape, LATENT), torch.nan), torch.full(shape, torch.nan)
    reference_mla_decode_partial(*parts, *read, expected, expected_lse)
    attention.mla_decode_partial(*parts, *read, out, lse)
    close(out, expected)
    close(lse, expected_lse)
    merged, total = torch.empty(3, 4, LATENT), torch.empty(3, 4)
    attention.merge_partials(out, lse, merged, total)
    whole, whole_lse = torch.empty(3, 4, LATENT), torch.empty(3, 4)
    reference_mla_decode(*parts, *read, whole, whole_lse)
    close(merged, whole)
    close(total, whole_lse)


def test_latent_extend_behind_a_prefix():
    cache, _, table = pages_of(1, LATENT + ROTARY, 45, 9, 3, fields=1)
    q = torch.randn(19, 5, LATENT + ROTARY)
    parts, starts, seq_lens = (q[..., :LATENT], q[..., LATENT:]), lens(0, 13, 13, 17), lens(45, 9, 3)
    expected, out = torch.full((2, 19, 5, LATENT), 3.0)
    reference_mla_extend(*parts, cache, table, starts, seq_lens, 0.3, expected)
    attention.mla_extend(*parts, cache, table, starts, seq_lens, 0.3, out)
    close(out, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.long) for each in (torch.float16, torch.float8_e4m3fn))],
)
def test_other_dtypes_of_queries_cache_and_output(dtype):
    """Each is widened when it is loaded, so the result is that of the reference over the same rounded values."""
    cache, _, table = pages_of(1, LATENT + ROTARY, 40, 3, fields=1)
    cache = cache.to(dtype)
    q = torch.randn(4, 5, LATENT + ROTARY).to(dtype)
    out = torch.empty(4, 5, LATENT, dtype=torch.float16 if dtype is torch.float16 else torch.bfloat16)
    expected, lse = torch.empty(4, 5, LATENT), torch.empty(2, 4, 5)
    wide = q.float()
    finite = cache.float().nan_to_num()
    reference_mla_decode(wide[..., :LATENT], wide[..., LATENT:], finite, table, lens(40, 3), 0.2, expected, lse[0])
    for rounded, bound in ((False, 8e-3), (True, 2e-2)):
        reads = Reads(cache, None, table, None, lens(40, 3), 0.2, rounded=rounded, kind="latent")
        paged_attention.attend(q[..., :LATENT], q[..., LATENT:], reads, out, lse[1], splits=3)
        close(out.float(), expected, bound)
        close(lse[1], lse[0], bound)


@pytest.mark.long
def test_blocks_beyond_two_gigabytes_are_found():
    pages = far_pages((1, 1, 16, 64), torch.float16, torch.Generator().manual_seed(0))
    if pages is None:
        pytest.skip("not enough memory for blocks that lie so far apart")
    cache = pages.arena[:, 0]
    q, out, expected = torch.randn(1, 2, 64), torch.empty(1, 2, 48), torch.empty(1, 2, 48)
    read = (q[..., :48], q[..., 48:], cache, pages.tables, lens(30), 0.2)
    reference_mla_decode(*read, expected, None)
    attention.mla_decode(*read, out, None)
    close(out, expected)


def test_padded_rows_read_the_null_page_alone():
    """A row of padding has length 0 and a table of zeros; block 0 may hold anything."""
    k_cache, v_cache, table = pages_of(1, 16, 12, 0)
    assert bool(torch.isnan(k_cache[0]).all())
    table[1] = 0
    q, out = torch.randn(2, 2, 16), torch.full((2, 2, 16), torch.nan)
    attention.decode(q, k_cache, v_cache, table, lens(12, 0), 0.25, 0, out)
    assert not out[1].any() and bool(out[0].isfinite().all())


@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "splits"), [(3, 128, 1, 4), (2, 64, 4, 7), (1, 16, 3, 64), (5, 128, 2, 1)]
)
def test_the_workspace_is_what_its_formula_says(batch, heads, q_len, splits):
    """Exactly, and never more than the formula for tiles that are padded to 128 rows."""
    told = paged_attention.workspace_bytes(batch * q_len, heads, splits, 512)
    if splits > 1:
        partials, lse = paged_attention.split_workspace(batch * q_len, heads, splits, 512, torch.device("cpu"))
        assert partials.untyped_storage().nbytes() == told
        assert partials.untyped_storage().data_ptr() == lse.untyped_storage().data_ptr()
        assert partials.numel() + lse.numel() == told // 4
    assert told <= partial_workspace_bytes(batch, heads, q_len, splits)


def test_merging_ignores_what_empty_parts_hold_and_keeps_one_that_is_alone():
    partials, lse = torch.randn(5, 3, 2, 40), torch.randn(5, 3, 2)
    lse[1:, 0] = -torch.inf
    lse[:, 1] = -torch.inf
    partials[torch.isneginf(lse)] = torch.nan
    out, total, expected, expected_total = (
        torch.empty(3, 2, 40),
        torch.empty(3, 2),
        torch.empty(3, 2, 40),
        torch.empty(3, 2),
    )
    attention.merge_partials(partials, lse, out, total)
    reference_merge_partials(partials, lse, expected, expected_total)
    close(out, expected)
    close(total, expected_total)
    assert torch.equal(out[0], partials[0, 0]) and torch.equal(total[0], lse[0, 0])
    with pytest.raises(ValueError, match="513 splits cannot be merged at once"):
        attention.merge_partials(torch.empty(513, 1, 1, 4), torch.empty(513, 1, 1), out, total)


@pytest.mark.long
def test_sinks_do_not_overflow():
    """A sink far above every score leaves almost nothing; one far below changes nothing."""
    k_cache, v_cache, table = pages_of(1, 16, 9)
    q, out = torch.randn(1, 2, 16), torch.empty(1, 2, 16)
    plain = torch.empty(1, 2, 16)
    attention.decode(q, k_cache, v_cache, table, lens(9), 0.25, 0, plain)
    for splits, (low, high) in itertools.product((1, 2), ((-1e30, 500.0),)):
        reads = Reads(k_cache, v_cache, table, None, lens(9), 0.25, 0, torch.tensor([low, high]))
        paged_attention.attend(q, None, reads, out, None, splits)
        close(out[:, 0], plain[:, 0])
        assert not out[:, 1].any()
    assert math.isfinite(float(out.sum()))


def test_calls_without_rows_launch_nothing():
    k_cache, v_cache, table = pages_of(2, 16, 5)
    nothing = torch.empty(0, 4, 16)
    attention.decode(nothing, k_cache, v_cache, table[:0], lens(), 1.0, 0, nothing)
    attention.extend(nothing, k_cache, v_cache, table[:0], lens(0), lens(), 1.0, 0, nothing)
    attention.merge_partials(torch.empty(2, 0, 4, 16), torch.empty(2, 0, 4), nothing, None)
