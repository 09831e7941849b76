"""The references against formulas written another way: numerics holds them to float64, this pins their meaning."""

import numpy as np
import pytest
import torch

from tokenspeed_kernel.ops.attention import reference_decode, reference_extend, reference_gqa_prologue
from tokenspeed_kernel.ops.embedding import bind_embedding
from tokenspeed_kernel.ops.gemm import bind_linear
from tokenspeed_kernel.ops.sampling import reference_apply_penalties, reference_sample, uniform
from tokenspeed_kernel.quantized import QuantizedTensor


def uniform_by_numpy(seed, choice, position):
    """The hash of ops/sampling.py again, in wrapping 64-bit arithmetic."""

    def mix(h):
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        return h ^ (h >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        h = mix(np.int64(seed).astype(np.uint64) + golden)
        h = mix((h ^ np.int64(choice).astype(np.uint64)) + golden)
        h = mix((h ^ np.int64(position).astype(np.uint64)) + golden)
    return float((np.float32(h >> np.uint64(40)) + np.float32(0.5)) * np.float32(2.0**-24))


def test_the_uniform_number_is_the_documented_hash():
    generator = np.random.default_rng(0)
    for _ in range(300):
        seed = int(generator.integers(-(1 << 63), (1 << 63) - 1))
        choice, position = (int(v) for v in generator.integers(-(1 << 31), (1 << 31) - 1, 2))
        assert uniform(seed, choice, position) == uniform_by_numpy(seed, choice, position)


@pytest.mark.parametrize(
    ("key", "numerator"),
    [
        ((0, 0, 0), 2327157.5),
        ((1, 0, 0), 11635202.0),
        ((0, 1, 0), 4515257.5),
        ((0, 0, 1), 3093159.5),
        ((-1, 2147483647, 8191), 528023.5),
    ],
)
def test_the_uniform_number_never_changes(key, numerator):
    """Tokens drawn with a seed last year are the tokens drawn with it today, by every kernel."""
    assert uniform(*key) == numerator / 2**24


def draw(logits, **columns):
    """reference_sample with one-row or many-row columns."""
    rows = logits.shape[0]

    def column(name, default, dtype):
        return torch.as_tensor(columns.get(name, default), dtype=dtype).expand(rows).contiguous()

    out = torch.empty(rows, dtype=torch.int32)
    reference_sample(
        logits.clone(),
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        column("seed", 0, torch.int64),
        column("choice", 0, torch.int32),
        column("position", 0, torch.int32),
        out,
    )
    return out


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.3}])
def test_tokens_are_drawn_as_often_as_the_distribution_says(parameters):
    probabilities = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.15, 0.1], dtype=torch.float64)
    expected = probabilities ** (1.0 / parameters.get("temperature", 1.0))
    kept = {"top_k": [1, 3, 4], "top_p": [1, 3, 4], "min_p": [1, 3, 4]}
    for name in parameters.keys() & kept.keys():
        mask = torch.zeros(6, dtype=torch.bool)
        mask[kept[name]] = True
        expected = torch.where(mask, expected, 0.0)
    expected /= expected.sum()
    draws = 3000
    logits = probabilities.log().float().expand(draws, 6)
    tokens = draw(logits, position=torch.arange(draws), seed=7, **parameters)
    counts = torch.bincount(tokens.long(), minlength=6).double()
    assert torch.equal(counts > 0, expected > 0)
    possible = expected > 0
    chi_square = (((counts - draws * expected) ** 2)[possible] / (draws * expected)[possible]).sum()
    assert chi_square < 30.0  # 5 degrees of freedom: a chance of 1 in 70 000, and the seed is fixed


def test_greedy_is_top_k_one_whatever_the_rest_says():
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).round()  # with ties
    greedy = draw(logits, top_k=1, temperature=5.0, top_p=0.1, seed=torch.arange(50))
    assert torch.equal(greedy.long(), torch.argmax(logits, dim=-1))
    lowest = [int(torch.nonzero(row == row.max())[0]) for row in logits]
    assert greedy.tolist() == lowest


def test_rows_do_not_influence_each_other():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(20, 300, generator=generator)
    columns = {"seed": torch.arange(20), "top_k": torch.tensor([0, 1, 4, 40] * 5), "top_p": 0.9}
    together = draw(logits, **columns)
    alone = [draw(logits[i : i + 1], seed=[i], top_k=[int(columns["top_k"][i])], top_p=0.9) for i in range(20)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_unsound_logits_still_give_an_id(top_k):
    logits = torch.randn(5, 9)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 4] = torch.inf
    logits[4, 0] = -torch.inf
    tokens = draw(logits, top_k=top_k)
    assert bool(((tokens >= 0) & (tokens < 9)).all())
    assert tokens[3] == 4
    assert tokens[4] != 0


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    counts = torch.tensor([[9, 9, 9, 9], [0, 2, 1, 0], [0, 0, 0, 0]], dtype=torch.int32)
    prompt = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.uint8)
    rows = torch.tensor([1, 2], dtype=torch.int32)
    reference_apply_penalties(
        logits, counts, prompt, rows, torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.25]), torch.tensor([2.0, 2.0])
    )
    assert logits.tolist() == [[1.0, -5.0, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0]]


def test_rotary_is_a_rotation_of_complex_pairs():
    heads, width, tokens = 2, 8, 5
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(tokens, heads, width, generator=generator) for _ in range(3))
    angles = torch.outer(torch.arange(50.0), 10000.0 ** (-torch.arange(0, width, 2) / width))
    positions = torch.tensor([0, 7, 49, 3, 3], dtype=torch.int32)
    k_cache, v_cache = torch.zeros(2, 2, heads, 8, width)
    slots = torch.tensor([8, 9, 15, -1, 3])
    expected = [
        torch.view_as_real(
            torch.complex(x[..., : width // 2], x[..., width // 2 :])
            * torch.polar(torch.ones(tokens, 1, width // 2), angles[positions.long()].unsqueeze(1))
        )
        .movedim(-1, -2)
        .flatten(-2)
        for x in (q, k)
    ]
    reference_gqa_prologue(
        q, k, v, positions, torch.cat([angles.cos(), angles.sin()], 1), None, None, 1e-6, k_cache, v_cache, slots
    )
    torch.testing.assert_close(q, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k_cache[1][:, [0, 1, 7]].transpose(0, 1), expected[1][:3], rtol=1e-5, atol=1e-5)
    assert torch.equal(v_cache[1][:, [0, 1, 7]].transpose(0, 1), v[:3])
    assert bool((v_cache[1][:, 2:7] == 0).all())  # the padding tokens went to block 0


def test_paged_attention_equals_torch_attention_on_contiguous_keys():
    heads, per_kv, width, granularity, length, chunk = 2, 3, 16, 8, 29, 6
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, heads, length, width, generator=generator)
    table = torch.tensor([[4, 1, 3, 2, -9]], dtype=torch.int32)
    k_cache, v_cache = torch.full((2, 5, heads, granularity, width), torch.nan)
    for position in range(length):
        block, offset = table[0, position // granularity], position % granularity
        k_cache[block, :, offset], v_cache[block, :, offset] = keys[:, position], values[:, position]
    q = torch.randn(chunk, heads * per_kv, width, generator=generator)
    mask = torch.arange(length) <= torch.arange(length - chunk, length).unsqueeze(1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys, values, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    seq_lens = torch.tensor([length], dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    starts = torch.tensor([0, chunk], dtype=torch.int32)
    reference_extend(q, k_cache, v_cache, table, starts, seq_lens, 0.3, 0, out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    again = torch.full_like(q, torch.nan)
    reference_decode(q, k_cache, v_cache, table, seq_lens, 0.3, 0, again)
    assert torch.equal(again, out)


@pytest.mark.parametrize("window", [1, 4, 6, 8, 11, 29, 100])
def test_a_window_is_a_band_under_the_diagonal(window):
    """A token sees itself and the window - 1 before it; pages that no query sees may be anything."""
    granularity, length, chunk = 4, 29, 6
    generator = torch.Generator().manual_seed(4)
    keys, values = torch.randn(2, 1, length, 8, generator=generator)
    position, key = torch.arange(length - chunk, length).unsqueeze(1), torch.arange(length)
    q = torch.randn(chunk, 2, 8, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        keys,
        values,
        attn_mask=(key <= position) & (key > position - window),
        scale=0.3,
        enable_gqa=True,
    ).transpose(0, 1)
    first_page = max(0, length - chunk + 1 - window) // granularity
    table = torch.arange(1, 9, dtype=torch.int32)[None].clone()
    table[0, :first_page] = 0
    k_cache, v_cache = torch.full((2, 9, 1, granularity, 8), torch.nan)
    for p in range(first_page * granularity, length):
        k_cache[1 + p // granularity, :, p % granularity] = keys[:, p]
        v_cache[1 + p // granularity, :, p % granularity] = values[:, p]
    out, seq_lens = torch.full_like(q, torch.nan), torch.tensor([length], dtype=torch.int32)
    reference_extend(
        q, k_cache, v_cache, table, torch.tensor([0, chunk], dtype=torch.int32), seq_lens, 0.3, window, out
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_bindings_refuse_what_does_not_fit():
    weight = QuantizedTensor.from_dense(torch.randn(4, 8), "layer.weight")
    for bias in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"layer.weight: its bias must be float32 \[4\]"):
            bind_linear(weight, bias)
    lookup = bind_embedding(weight, override="reference")
    for ids in ([4], [-1, 0]):
        with pytest.raises(IndexError, match=r"layer.weight: token ids from .* the embedding has rows 0 to 3"):
            lookup(torch.tensor(ids, dtype=torch.int32), torch.empty(len(ids), 8))


def test_a_bound_linear_computes_and_says_what_it_is():
    weight, bias = torch.randn(4, 8), torch.randn(4)
    bound = bind_linear(QuantizedTensor.from_dense(weight, "w"), bias, override="reference")
    x, out = torch.randn(3, 8), torch.empty(3, 4)
    bound(x, out)
    torch.testing.assert_close(out, x @ weight.T + bias)
    assert bound.spec.name == "reference_gemm_linear"
    assert bound.selection.override.target == "reference"
