"""Attention over keys that lie side by side, by Triton's interpreter against the reference: edges of tiles, rows
without queries or keys, operands that are rounded."""

import pytest
import torch

from tokenspeed_kernel.ops.ragged import reference_ragged
from tokenspeed_kernel_triton import ragged
from tokenspeed_kernel_triton.configs import SHARED_MEMORY
from tokenspeed_kernel_triton.device import compiling_for


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def agrees(fn, queries, keys, dims=(24, 16), shared=2, causal=True, bound=2e-6):
    """Random rows; k and v are parts of one buffer, as a joined product leaves them."""
    starts, key_starts = (torch.tensor([0, *counts]).cumsum(0).to(torch.int32) for counts in (queries, keys))
    dim, value = dims
    q, kv = torch.randn(sum(queries), 2 * shared, dim + 3), torch.randn(sum(keys), 2, dim + value)
    call = (q[..., :dim], kv[..., :dim], kv[..., dim:], starts, key_starts, 0.3)
    outputs = []
    for one in (fn, reference_ragged):
        out, lse = (
            torch.full((sum(queries), 2 * shared, value), torch.nan),
            torch.full((sum(queries), 2 * shared), torch.nan),
        )
        one(*call, out, lse, causal)
        outputs.append((out, lse))
    for found, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_chunk_behind_a_prefix_and_rows_without_queries_or_keys(causal):
    agrees(ragged.ragged, (5, 0, 3, 2), (40, 7, 0, 2), causal=causal)


def test_rounded_operands_stay_within_what_rounding_does():
    agrees(ragged.rounded_ragged, (5, 1), (40, 1), bound=3e-2)


@pytest.mark.long
@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
def test_the_tiles_of_every_architecture_end_anywhere(architecture):
    with compiling_for(architecture):
        for fn, bound in ((ragged.ragged, 2e-6), (ragged.rounded_ragged, 5e-2)):
            agrees(fn, (1, 33, 65), (31, 33, 130), (20, 16), bound=bound)


@pytest.mark.long
@pytest.mark.parametrize("dims", [(1, 1), (16, 40), (37, 7), (192, 128), (256, 256)])
def test_heads_of_any_size(dims):
    agrees(ragged.ragged, (3,), (20,), dims)
