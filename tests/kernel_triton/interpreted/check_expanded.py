"""Attention over keys and values of each head by Triton's interpreter: ragged rows, and what is expanded out of latents
some positions at a time."""

import pytest
import torch

from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.mla_expanded import make_reference_mla_extend_expanded
from tokenspeed_kernel.ops.ragged import reference_ragged
from tokenspeed_kernel_triton import expanded

HEADS, PLAIN, VALUE, ROTARY, PAGE = 2, 12, 20, 6, 8


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def ragged_cases():
    yield 2, 2, 24, 20, True
    for case in ((6, 2, 24, 20, True), (4, 4, 192, 128, False), (5, 1, 16, 33, False)):
        yield pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(("heads", "kv_heads", "width", "value", "causal"), ragged_cases())
def test_ragged_rows_of_queries_and_keys(heads, kv_heads, width, value, causal):
    """Rows without queries, without keys, with fewer keys than queries; strided heads; queries of nobody."""
    q, k = torch.randn(heads, 13, width).transpose(0, 1), torch.randn(50, kv_heads, width + 3)[..., :width]
    v = torch.randn(50, kv_heads, value)
    read = (q, k, v, ints(0, 5, 5, 8, 11), ints(0, 41, 44, 44, 46), 0.2)
    results = []
    for fn in (reference_ragged, expanded.ragged):
        out, lse = torch.full((13, heads, value), 7.0), torch.full((13, heads), 7.0)
        fn(*read, out, lse, causal)
        results.append((out, lse))
    torch.testing.assert_close(results[1], results[0], rtol=3e-6, atol=3e-6)
    assert bool((results[1][0][11:] == 7.0).all()) and not results[1][0][5:8].any()


def latents(*seq_lens, latent, dtype):
    """A strided cache of scattered blocks, NaN in the null one, and its page table, wider than any row."""
    pages = max(seq_lens) // PAGE + 3
    cache = torch.randn(len(seq_lens) * pages + 1, 2, 1, PAGE, latent + ROTARY).to(dtype)[:, 1]
    cache[0] = torch.nan
    return cache, 1 + torch.randperm(len(seq_lens) * pages).view(len(seq_lens), pages).to(torch.int32)


def expanded_cases():
    yield "bfloat16", 24, True, 1
    yield pytest.param("bfloat16", 24, False, 1, marks=pytest.mark.long)
    for name, latent in (("float32", 17), ("gguf_q8_0", 32), ("gguf_q4_k", 256)):
        yield pytest.param(name, latent, False, 1 << 20, marks=pytest.mark.long)


@pytest.mark.parametrize(("name", "latent", "rounded", "held_bytes"), expanded_cases())
def test_latents_are_expanded_some_positions_at_a_time(monkeypatch, name, latent, rounded, held_bytes):
    """A row that ends in each part, one that has ended before, one without queries; parts that nobody reaches."""
    monkeypatch.setattr(expanded, "EXPANDED_BYTES", held_bytes)
    seq_lens, starts = (140, 9, 70), ints(0, 5, 5, 12)
    dtype = torch.bfloat16 if rounded else torch.float32
    weight = random_weight(name, HEADS * (PLAIN + VALUE), latent, torch.Generator().manual_seed(1)).weight
    cache, table = latents(*seq_lens, latent=latent, dtype=dtype)
    q = torch.randn(13, HEADS, PLAIN + ROTARY + 1)[..., : PLAIN + ROTARY]
    make = expanded.make_rounded_mla_extend_expanded if rounded else expanded.make_mla_extend_expanded
    found, expected = torch.full((2, 13, HEADS, VALUE), 7.0)
    read = (q, cache, table, starts, ints(*seq_lens), 0.2)
    make_reference_mla_extend_expanded(weight, HEADS)(*read, expected)
    make(weight, HEADS)(*read, found)
    bound = 3e-2 if rounded else 5e-6
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert bool((found[12] == 7.0).all())


def test_positions_that_are_held_fit_their_bytes():
    """DeepSeek's 128 heads in bfloat16: 4096 positions of one row, shares of them where there are more; never none."""
    of_position = 128 * 256 * 2
    assert expanded.held_positions(1, 1 << 17, of_position) == 4096
    assert expanded.held_positions(3, 1 << 17, of_position) == 1344
    assert expanded.held_positions(1, 100, of_position) == 128
    assert expanded.held_positions(1000, 1 << 17, of_position) == 64


def test_calls_without_rows_launch_nothing():
    nothing, weight = torch.empty(0, 2, 18), random_weight("float32", 64, 24, torch.Generator()).weight
    expanded.ragged(nothing, nothing, nothing, ints(0), ints(0), 1.0, nothing, None, True)
    cache, table = latents(9, latent=24, dtype=torch.float32)
    expanded.make_mla_extend_expanded(weight, 2)(nothing, cache, table[:0], ints(0), ints(), 1.0, nothing[..., :20])
