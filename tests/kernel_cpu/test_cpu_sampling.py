"""The sampler's operations against the references."""

import pytest
import torch

from tokenspeed_kernel.ops import (
    bind_apply_penalties,
    bind_apply_token_mask,
    bind_has_nan,
    bind_logprobs,
    bind_sample,
)
from tokenspeed_kernel.ops.sampling import uniform
from tokenspeed_kernel_cpu import _native


def _sample(
    logits: torch.Tensor,
    override: str | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_seed: int = 0,
) -> torch.Tensor:
    rows = logits.shape[0]
    bound = bind_sample(override=override)
    assert override or bound.spec.name == "cpu_sampling_sample"
    seed = torch.arange(first_seed, first_seed + rows, dtype=torch.int64) * 7919 - 40
    choice = torch.arange(rows, dtype=torch.int32) % 3
    position = torch.arange(rows, dtype=torch.int32) * 13
    parameters = (torch.full((rows,), value) for value in (temperature, top_p, min_p))
    temperatures, top_ps, min_ps = parameters
    out = torch.full((rows,), -5, dtype=torch.int32)
    top_ks = torch.full((rows,), top_k, dtype=torch.int32)
    bound.fn(logits.clone(), temperatures, top_ks, top_ps, min_ps, seed, choice, position, out)
    return out


def test_uniform_numbers_are_the_references(instruction_set: str) -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 1234567890123):
        for choice in (0, 1, 5):
            for position in (0, 1, 77, 2**31 - 1):
                assert _native.uniform(seed, choice, position) == uniform(seed, choice, position)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 50},
        {"top_k": 900_000},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"min_p": 0.999},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
        {"top_k": 300, "top_p": 0.99, "temperature": 2.0},
    ],
    ids=str,
)
def test_draws_are_the_references(instruction_set: str, size: int, parameters: dict[str, float]) -> None:
    logits = torch.randn(40, size) * 3
    assert torch.equal(_sample(logits, **parameters), _sample(logits, "reference", **parameters))


@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 50}, {"top_k": 40_000}, {"top_p": 0.95}, {"min_p": 0.01, "temperature": 4.0}], ids=str
)
def test_draws_of_a_whole_vocabulary_are_the_references(parameters: dict[str, float]) -> None:
    logits = torch.randn(8, 49152) * 3
    assert torch.equal(_sample(logits, **parameters), _sample(logits, "reference", **parameters))


def test_ties_go_to_the_lower_id(instruction_set: str) -> None:
    logits = torch.randint(-3, 4, (200, 97)).float()
    for parameters in ({"top_k": 1}, {"top_k": 5}, {}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert torch.equal(_sample(logits, **parameters), _sample(logits, "reference", **parameters))
    assert torch.equal(_sample(logits, top_k=1).long(), logits.argmax(dim=1))


def test_infinite_logits(instruction_set: str) -> None:
    logits = torch.randn(64, 50)
    logits[:, ::2] = -torch.inf
    drawn = _sample(logits, temperature=3.0)
    assert torch.equal(drawn, _sample(logits, "reference", temperature=3.0))
    assert (drawn % 2 == 1).all()
    logits[:, 7] = logits[:, 9] = torch.inf
    assert (_sample(logits) == 7).all()
    assert (_sample(torch.full((3, 5), -torch.inf)) == 0).all()


def test_a_row_of_not_a_number_gives_some_token(instruction_set: str) -> None:
    logits = torch.randn(6, 33)
    logits[0, 5] = logits[1] = torch.nan
    for top_k in (0, 1, 4):
        drawn = _sample(logits, top_k=top_k)
        assert ((drawn >= 0) & (drawn < 33)).all()
        assert torch.equal(drawn[2:], _sample(logits, "reference", top_k=top_k)[2:])


def test_draws_follow_the_distribution(instruction_set: str) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = _sample(probabilities.log().expand(4000, 4).contiguous())
    shares = torch.bincount(drawn.long(), minlength=4) / 4000
    assert (shares - probabilities).abs().max() < 0.03


def test_no_rows(instruction_set: str) -> None:
    assert _sample(torch.empty(0, 10)).shape == (0,)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
def test_penalties(instruction_set: str, mask_dtype: torch.dtype) -> None:
    logits = torch.randn(9, 101) * 4
    counts = torch.randint(0, 3, (5, 101), dtype=torch.int32)
    mask = (torch.rand(5, 101) < 0.3).to(mask_dtype)
    rows = torch.randint(0, 5, (9,), dtype=torch.int32)
    presence, frequency, repetition = torch.rand(9), torch.rand(9) - 0.5, torch.rand(9) + 0.6
    presence[3], frequency[3], repetition[3] = 0.0, 0.0, 1.0
    ours, theirs = logits.clone(), logits.clone()
    bound = bind_apply_penalties()
    assert bound.spec.name == "cpu_sampling_apply_penalties"
    bound.fn(ours, counts, mask, rows, presence, frequency, repetition)
    bind_apply_penalties(override="reference").fn(theirs, counts, mask, rows, presence, frequency, repetition)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[3], logits[3])


@pytest.mark.parametrize("size", [1, 31, 64, 1000])
def test_token_masks(instruction_set: str, size: int) -> None:
    logits = torch.randn(9, size)
    mask = torch.randint(-(1 << 31), 1 << 31, (4, -(-size // 32)), dtype=torch.int64).to(torch.int32)
    mask[1], mask[2] = -1, 0
    rows = torch.tensor([0, 1, 2, 3, -1, 3, 0, -1, 2], dtype=torch.int32)
    ours, theirs = logits.clone(), logits.clone()
    bound = bind_apply_token_mask()
    assert bound.spec.name == "cpu_sampling_apply_token_mask"
    bound.fn(ours, mask, rows)
    bind_apply_token_mask(override="reference").fn(theirs, mask, rows)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[[1, 4, 7]], logits[[1, 4, 7]])
    assert torch.isinf(ours[[2, 8]]).all()


@pytest.mark.parametrize(
    ("rows", "size", "k"), [(0, 5, 2), (3, 1, 1), (4, 1000, 0), (17, 1000, 20), (2, 49152, 5), (3, 40, 40)]
)
def test_logprobs(instruction_set: str, rows: int, size: int, k: int) -> None:
    logits = (torch.randn(rows, size) * 5).mul(4).round().div(4)  # many ties
    ids = torch.randint(0, size, (rows,), dtype=torch.int32)
    results = []
    for override in (None, "reference"):
        bound = bind_logprobs(override=override)
        assert override or bound.spec.name == "cpu_sampling_logprobs"
        out = torch.full((rows,), torch.nan)
        top_ids, top = torch.full((rows, k), -1, dtype=torch.int32), torch.full((rows, k), torch.nan)
        bound.fn(logits, ids, k, out, top_ids, top)
        results.append((out, top_ids, top))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-6, atol=1e-5)


def test_has_nan(instruction_set: str) -> None:
    logits = torch.randn(40, 37)
    logits[0, 0] = logits[7, 36] = logits[8, 20] = torch.nan
    logits[9, 3] = torch.inf
    out = torch.ones(40, dtype=torch.bool)
    bound = bind_has_nan()
    assert bound.spec.name == "cpu_sampling_has_nan"
    bound.fn(logits, out)
    assert out.nonzero().flatten().tolist() == [0, 7, 8]
