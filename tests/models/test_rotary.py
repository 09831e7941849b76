"""The rotary table equals transformers' own, far out too."""

import pytest
import torch

from tokenspeed.layers.rotary import rotary_table
from tokenspeed.recipes.model_config import RopeConfig

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64.0,
}


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=10000.0),
        RopeConfig(theta=100000.0, kind="linear", parameters={"factor": 4.0}),
        RopeConfig(theta=500000.0, kind="llama3", parameters=LLAMA3),
    ],
    ids=lambda rope: rope.kind,
)
def test_equals_transformers(rope: RopeConfig) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.parameters}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=4096, rope_parameters=parameters
    )
    count = 4096
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(count)[None])
    table = rotary_table(rope, head_dim=64, num_positions=count)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], atol=1e-6, rtol=1e-6)


def test_factors_divide_the_frequencies() -> None:
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    plain = rotary_table(RopeConfig(), head_dim=8, num_positions=9)
    scaled = rotary_table(RopeConfig(), head_dim=8, num_positions=9, factors=factors)
    for column, factor in enumerate(factors.int().tolist()):
        assert torch.allclose(scaled[8, column], plain[8 // factor, column])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'longrope' is unknown"):
        rotary_table(RopeConfig(kind="longrope"), head_dim=8, num_positions=1)
