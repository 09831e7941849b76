"""Sampling by Triton's interpreter against the reference: the same tokens, ties and cuts included."""

import pytest
import torch

from tokenspeed_kernel.ops.sampling import (
    reference_apply_penalties,
    reference_apply_token_mask,
    reference_has_nan,
    reference_logprobs,
    reference_sample,
)
from tokenspeed_kernel_triton import sampling


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def draws(logits, top_k, top_p, min_p, temperature=1.0, seed=5):
    rows = logits.shape[0]
    arguments = (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) * 1000003 - seed,
        torch.arange(rows, dtype=torch.int32) % 3,
        torch.arange(rows, dtype=torch.int32),
    )
    found, expected = torch.empty(2, rows, dtype=torch.int32)
    reference_sample(logits.clone(), *arguments, expected)
    sampling.sample(logits, *arguments, found)
    assert found.tolist() == expected.tolist()


def test_greedy_takes_the_lowest_id_of_the_largest():
    logits = torch.randn(4, 70)
    logits[1, [9, 40, 69]] = 9.0
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    draws(logits, 1, 1.0, 0.0)
    found = torch.empty(4, dtype=torch.int32)
    zeros = torch.zeros(4)
    sampling.sample(
        logits,
        zeros + 1,
        ints(1, 1, 1, 1),
        zeros + 1,
        zeros,
        torch.arange(4),
        ints(0, 0, 0, 0),
        ints(0, 0, 0, 0),
        found,
    )
    assert found[1] == 9 and found[2] == 0 and found[3] == 0


def test_a_draw_through_every_cut():
    draws(torch.randn(1, 40).round(), 7, 0.8, 0.05, 0.7)
    draws(torch.randn(2, 40), 0, 1.0, 0.999, 5.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.6, 0.0), (5, 1.0, 0.0), (12, 0.9, 0.1), (0, 1.0, 0.3), (100, 0.2, 0.0)]
)
def test_every_cut_with_ties_and_masked_tokens(top_k, top_p, min_p):
    logits = (torch.randn(5, 60) * 2.0).round()
    logits[1] = 3.0
    logits[2, ::2] = -torch.inf
    logits[3, 0] = -0.0
    logits[3, 1:] = 0.0
    for seed in (1, 2):
        draws(logits, top_k, top_p, min_p, seed=seed)


def test_masks_penalties_and_nan():
    logits, mask = torch.randn(3, 70), torch.randint(-(2**31), 2**31 - 1, (2, 3), dtype=torch.int32)
    expected, rows = logits.clone(), ints(1, -1, 0)
    reference_apply_token_mask(expected, mask, rows)
    sampling.apply_token_mask(logits, mask, rows)
    assert torch.equal(logits, expected) and bool(torch.isneginf(logits[0]).any())
    logits = torch.randn(2, 70)
    counts, seen = torch.randint(0, 3, (4, 70), dtype=torch.int32), torch.rand(4, 70) < 0.3
    rules = (counts, seen, ints(3, 0), torch.tensor([0.4, 0.0]), torch.tensor([0.1, 0.2]), torch.tensor([1.3, 0.7]))
    expected = logits.clone()
    reference_apply_penalties(expected, *rules)
    sampling.apply_penalties(logits, *rules)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    logits[1, 69] = torch.nan
    found, right = torch.empty(2, 2, dtype=torch.bool)
    reference_has_nan(logits, right)
    sampling.has_nan(logits, found)
    assert found.tolist() == right.tolist() == [False, True]


def test_logprobs_and_the_best_with_ties():
    logits = torch.randn(2, 50).round()
    results = []
    for fn in (reference_logprobs, sampling.logprobs):
        one, ids, best = torch.empty(2), torch.empty(2, 6, dtype=torch.int32), torch.empty(2, 6)
        fn(logits, ints(3, 49), 6, one, ids, best)
        results.append((one, ids, best))
    assert torch.equal(results[0][1], results[1][1])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
