"""How a decode is cut: folding is a view, the workspace has the size that its formula says, every key is somebody's."""

from dataclasses import replace

import mla_twin
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from tokenspeed_kernel.ops.mla import reference_mla_decode
from tokenspeed_mla import DecodePlan
from tokenspeed_mla.addressing import PAGE_SIZES, TILE_KEYS, TILE_ROWS, ceil_div, split_keys
from tokenspeed_mla.decode import by_group, split_workspace
from tokenspeed_mla.plan import tile_rows_of

plans = some.builds(
    DecodePlan,
    batch=some.integers(1, 3),
    q_len=some.integers(1, 6),
    heads=some.sampled_from([1, 2, 8, 12, 16, 20, 32, 48, 64, 65, 96, 128]),
    splits=some.integers(1, 9),
    tile_rows=some.sampled_from([64, 128]),
)
few = settings(deadline=None, max_examples=25)


@pytest.mark.parametrize(
    ("heads", "q_len", "fold", "groups", "rows", "padded"),
    [
        (128, 1, 1, 1, 128, 128),
        (64, 4, 1, 4, 64, 64),
        (16, 4, 4, 1, 64, 64),
        (16, 6, 3, 2, 48, 64),
        (24, 3, 1, 3, 24, 64),
    ],
)
def test_query_tokens_are_folded_into_the_head_axis(heads, q_len, fold, groups, rows, padded):
    plan = DecodePlan(2, q_len, heads, 1)
    assert (plan.fold, plan.groups, plan.rows, plan.padded_rows) == (fold, groups, rows, padded)
    assert plan.grid == (padded // TILE_ROWS, 2 * groups, 1)


@few
@given(plans)
def test_folding_is_a_view_of_the_same_storage(plan):
    out = (
        torch.arange(plan.batch * plan.q_len * plan.heads).repeat_interleave(512).view(-1, plan.q_len, plan.heads, 512)
    )
    lse = torch.zeros(out.shape[:3])
    folded, _ = by_group(replace(plan, splits=1), out, lse)
    assert folded.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    request, group, row = plan.batch - 1, plan.groups - 1, plan.rows - 1
    token, head = group * plan.fold + row // plan.heads, row % plan.heads
    assert folded[0, request * plan.groups + group, row, 0] == out[request, token, head, 0]


@few
@given(plans)
def test_the_workspace_is_what_its_formula_says(plan):
    """B * rows(H, q_len, tile) * splits * (512 + 1) * 4 bytes, 0 for one split; a pair's tile has 128 rows."""
    rows = plan.groups * ceil_div(plan.rows, plan.tile_rows) * plan.tile_rows
    expected = 0 if plan.splits == 1 else plan.batch * rows * plan.splits * 513 * 4
    assert plan.workspace_bytes == expected
    if expected:
        workspace = torch.zeros(expected // 4)
        partials, lse = split_workspace(plan, workspace)
        assert partials.numel() + lse.numel() == workspace.numel()
        partials.fill_(1.0)
        lse.add_(1.0)
        assert bool((workspace == 1.0).all())


@few
@given(some.integers(0, 2000), some.sampled_from(PAGE_SIZES), some.integers(1, 70))
def test_every_key_is_in_one_split(seq_len, page, splits):
    owners = torch.zeros(max(seq_len, 1) + page * splits, dtype=torch.int32)
    for split in range(splits):
        first, share = split_keys(seq_len, page, split, splits)
        assert first % page == 0
        owners[first : min(first + share, seq_len)] += 1
    assert bool((owners[:seq_len] == 1).all())


@pytest.mark.parametrize(
    ("heads", "q_len", "tile_rows", "blocks"),
    [
        (128, 1, 128, 2),
        (64, 1, 64, 1),
        (64, 4, 128, 2),
        (16, 4, 64, 1),
        (16, 8, 128, 2),
        (192, 1, 64, 3),
        (256, 1, 128, 4),
    ],
)
def test_a_pair_takes_the_rows_that_fill_more_than_a_block(heads, q_len, tile_rows, blocks):
    assert tile_rows_of(True, heads, q_len) == tile_rows
    assert tile_rows_of(False, heads, q_len) == 64
    assert DecodePlan(1, q_len, heads, 1, tile_rows).grid[0] == blocks


def test_a_pair_counts_for_two_processors():
    assert DecodePlan.choose(1, 1, 128, 1024, 148, 128).splits <= 74 < DecodePlan.choose(1, 1, 64, 1024, 148).splits


def test_a_tile_of_another_size_is_refused():
    with pytest.raises(ValueError, match="64 or 128 rows"):
        DecodePlan(1, 1, 128, 1, 256)


def test_one_row_on_a_whole_gpu_is_split_and_many_are_not():
    assert DecodePlan.choose(1, 1, 128, 128, 132).splits > 1
    assert DecodePlan.choose(200, 1, 128, 2, 132).splits <= 2


def test_a_launch_has_no_more_blocks_than_a_gpu_takes():
    assert DecodePlan(65535, 1, 128, 1).grid == (2, 65535, 1)
    with pytest.raises(ValueError, match="at most 65535"):
        DecodePlan(65536, 1, 128, 1)


@pytest.mark.parametrize("wrong", [(-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_a_plan_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        DecodePlan(*wrong)


@few
@given(
    some.lists(some.integers(0, 300), min_size=1, max_size=3),
    some.integers(1, 4),
    some.sampled_from([1, 5, 24, 64, 80]),
    some.sampled_from(PAGE_SIZES),
    some.sampled_from([1, 2, 3, 7]),
)
def test_the_algorithm_is_latent_attention(lengths, q_len, heads, page, splits):
    """The twin of the kernel, on the kernel's own arithmetic of places, against the reference."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    pages = [ceil_div(n, page) for n in lengths]
    order = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
    cache = torch.full((sum(pages) + 1, page, 576), torch.nan)
    table = torch.full((len(lengths), max(pages) + TILE_KEYS), 10**6, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(pages[row]):
            table[row, index] = order.pop()
            filled = min(page, length - index * page)
            cache[table[row, index], :filled] = torch.randn(filled, 576, generator=generator)
    q, seq_lens = torch.randn(len(lengths), q_len, heads, 576, generator=generator), torch.tensor(lengths).int()
    out, lse = mla_twin.decode(DecodePlan(len(lengths), q_len, heads, splits), q, cache, table, seq_lens, 0.05)
    flat = q.flatten(0, 1)
    exact, exact_lse = torch.empty(flat.shape[0], heads, 512), torch.empty(flat.shape[:2])
    latents = cache.unsqueeze(1)
    reference_mla_decode(flat[..., :512], flat[..., 512:], latents, table, seq_lens, 0.05, exact, exact_lse)
    torch.testing.assert_close(out.view(exact.shape), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.view(exact_lse.shape), exact_lse, rtol=1e-5, atol=1e-5)
