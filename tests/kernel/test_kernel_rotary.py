"""Rotary tables against transformers' and float64, and rotary.apply against its meaning."""

import importlib
import math
import types

import pytest
import torch

from tokenspeed_kernel.ops.rotary import bind_rotary
from tokenspeed_kernel.ops.rotary_tables import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    mrope_axes,
    rotary_frequencies,
    rotary_magnitude,
    rotary_table,
    yarn_magnitude,
)

WIDTH, THETA, POSITIONS = 64, 150000.0, 4096


def of_transformers(parameters):
    """Frequencies and magnitude that transformers computes for a config with these rope parameters."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=WIDTH * 2,
        num_attention_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": THETA, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
YARN_KEYS = {"factor": 32.0, "original_positions": 4096}


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=1024),
        ),
        (YARN, YarnScaling(**YARN_KEYS)),
        # a ramp that ends beyond the last pair, and one that would begin before the first
        ({**YARN, "original_max_position_embeddings": 4000000}, YarnScaling(factor=32.0, original_positions=4000000)),
        ({**YARN, "original_max_position_embeddings": 128}, YarnScaling(factor=32.0, original_positions=128)),
        ({**YARN, "truncate": False}, YarnScaling(**YARN_KEYS, truncate=False)),  # gpt-oss
        (
            {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
            YarnScaling(**YARN_KEYS, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
        ),
        ({**YARN, "mscale": 0.6, "mscale_all_dim": 0.7}, YarnScaling(**YARN_KEYS, mscale=0.6, mscale_all_dim=0.7)),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, YarnScaling(**YARN_KEYS, mscale=1.0, mscale_all_dim=1.0)),
    ],
)
def test_frequencies_and_magnitude_are_those_of_transformers(parameters, scaling):
    frequencies, magnitude = of_transformers(parameters)
    torch.testing.assert_close(rotary_frequencies(THETA, WIDTH, scaling), frequencies, rtol=1e-6, atol=0.0)
    assert rotary_magnitude(scaling) == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("scaling", [None, LinearScaling(4.0), YarnScaling(factor=8.0, original_positions=512)])
def test_a_table_holds_cosines_then_sines(scaling):
    """Against float64, with as much error as a float32 angle has."""
    table = rotary_table(10000.0, 16, 2000, scaling).double() / rotary_magnitude(scaling)
    angles = torch.outer(torch.arange(2000).double(), rotary_frequencies(10000.0, 16, scaling).double())
    expected = torch.cat([angles.cos(), angles.sin()], dim=1)
    torch.testing.assert_close(table, expected, rtol=0.0, atol=2000 * 2.0**-23)
    assert rotary_table(10000.0, 16, 0, scaling).shape == (0, 16)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    plain = rotary_frequencies(10000.0, 128)
    scaled = rotary_frequencies(10000.0, 128, YarnScaling(factor=40.0, original_positions=4096))
    turns = 4096 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns > 33], plain[turns > 33])
    torch.testing.assert_close(scaled[turns < 0.9], plain[turns < 0.9] / 40.0)
    between = (turns < 30) & (turns > 1.2)
    assert bool(((scaled < plain) & (scaled > plain / 40.0))[between].all())
    assert yarn_magnitude(1.0) == 1.0
    assert yarn_magnitude(40.0, 0.707) == pytest.approx(0.1 * 0.707 * math.log(40.0) + 1.0)


@pytest.mark.parametrize(("theta", "width"), [(10000.0, 7), (10000.0, 0), (1.0, 8)])
def test_a_table_that_cannot_be(theta, width):
    with pytest.raises(ValueError, match=f"rotary_dim {width} must be even and above 0, theta {theta} above 1"):
        rotary_frequencies(theta, width)


# ---------------------------------------------------------------- applying


def apply(x, positions, axes, table, interleaved):
    out = x.clone()
    count = positions.shape[0]
    bound = bind_rotary(head_dim=x.shape[2], interleaved=interleaved, axes=count, override="reference")
    bound(out, positions, axes, table, interleaved)
    return out


def test_halves_are_the_rotation_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, positions = torch.randn(5, 3, 16), torch.tensor([0, 9, 3, 77, 1])
    table = rotary_table(10000.0, 16, 80)
    cos, sin = (part[positions].repeat(1, 2)[None] for part in table.chunk(2, dim=1))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    found = apply(x, positions[None].int(), None, table, interleaved=False)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_neighbours_are_complex_numbers():
    x, positions = torch.randn(4, 2, 10), torch.tensor([[0, 5, 2, 31]], dtype=torch.int32)
    angles = torch.outer(torch.arange(32).float(), rotary_frequencies(10000.0, 6))
    turn = torch.polar(torch.ones(4, 3), angles[positions[0].long()]).unsqueeze(1)
    expected = torch.view_as_real(torch.view_as_complex(x[..., :6].reshape(4, 2, 3, 2)) * turn).reshape(4, 2, 6)
    found = apply(x, positions, None, rotary_table(10000.0, 6, 32), interleaved=True)
    torch.testing.assert_close(found[..., :6], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[..., 6:], x[..., 6:])  # a partial rotation leaves the rest alone


def test_permuted_halves_are_neighbours():
    """What a loader does to the rows of q and k, so that attention's prologue needs no second pairing."""
    x, positions = torch.randn(6, 2, 12), torch.arange(6, dtype=torch.int32)[None]
    table = rotary_table(10000.0, 12, 6)
    halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    rotated = apply(halves, positions, None, table, interleaved=False)
    neighbours = apply(x, positions, None, table, interleaved=True)
    assert torch.equal(torch.cat([neighbours[..., 0::2], neighbours[..., 1::2]], dim=-1), rotated)


@pytest.mark.parametrize(
    ("model", "name", "sections", "interleaved"),
    [
        ("qwen2_vl", "Qwen2VLRotaryEmbedding", (2, 3, 3), False),
        ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", (4, 2, 2), True),
    ],
)
def test_sections_are_those_of_qwen_vl(model, name, sections, interleaved):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = types.SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)},
        max_position_embeddings=40,
        head_dim=16,
    )
    x, positions = torch.randn(5, 2, 16), torch.randint(0, 40, (3, 5))
    cos, sin = getattr(module, name)(config)(x, positions[:, None])
    heads = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    axes, table = mrope_axes(sections, interleaved), rotary_table(10000.0, 16, 40)
    found = apply(x, positions.int(), axes, table, interleaved=False)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_axes_of_sections():
    assert mrope_axes((2, 1, 3)).tolist() == [0, 0, 1, 2, 2, 2]
    assert mrope_axes((4, 2, 2), interleaved=True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert mrope_axes((5,)).tolist() == [0] * 5
    with pytest.raises(ValueError, match="must be positive"):
        mrope_axes((2, 0, 2))
    with pytest.raises(ValueError, match="cannot take turns"):
        mrope_axes((1, 3, 3), interleaved=True)


def test_equal_axes_are_plain_positions():
    x, row = torch.randn(7, 2, 16), torch.randint(0, 40, (1, 7), dtype=torch.int32)
    table = rotary_table(10000.0, 16, 40)
    three = apply(x, row.repeat(3, 1), mrope_axes((3, 3, 2)), table, interleaved=False)
    assert torch.equal(three, apply(x, row, None, table, interleaved=False))
