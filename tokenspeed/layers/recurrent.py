"""What layers with a state share: the state's fields, the short convolution before the rule, and the rule itself."""

from collections.abc import Sequence

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import LayerCache, StateRows
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.layers.parts import ModelParts
from tokenspeed.recipes.model_config import LinearAttentionConfig, ModelConfig

UNIT_EPS = 1e-6
"""What the sum of the squares of a key or query is raised by before its root is taken, whatever the model's epsilon."""


def linear_of(config: ModelConfig) -> LinearAttentionConfig:
    """The dimensions of layers with a state; ValueError where the model has none."""
    if config.linear is None:
        raise ValueError(f"{config.architecture}: the configuration has no layers with a state")
    return config.linear


def state_group(config: ModelConfig) -> CacheGroupSpec:
    """The last inputs of the convolution and the matrix of every head, in float32 whatever the cache is: errors of a
    state stay in it."""
    linear = linear_of(config)
    return CacheGroupSpec(
        group_id="state",
        kind="state",
        layers=linear.layers,
        fields=(
            CacheFieldSpec(name="inputs", heads=linear.conv_width - 1, dim=linear.channels),
            CacheFieldSpec(name="matrix", heads=linear.value_heads, dim=linear.key_dim * linear.value_dim),
        ),
        dtype="float32",
        checkpoint_granularity=linear.checkpoint,
    )


def state_attention_spec() -> AttentionSpec:
    """How a group of states "attends"."""
    return AttentionSpec(backend="recurrent")


class Convolution:
    """The channels ``first`` and on of a layer's convolution; ``weight`` float32 [channels, width] as checkpoints have
    it."""

    def __init__(self, parts: ModelParts, weight: torch.Tensor, first: int = 0) -> None:
        channels, width = weight.shape
        self._weight = weight.T.contiguous()
        self._span = slice(first, first + channels)
        self._convolve = parts.kernels.causal_conv(width=width, biased=False)

    def bind_cache(self, inputs: torch.Tensor) -> None:
        """``inputs``: the field of the state group."""
        self._state = inputs[..., self._span]

    def forward(self, rows: StateRows, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, channels] of ``x``, whose rows may be apart."""
        self._convolve(x, self._weight, None, self._state, rows.starts, rows.sources, rows.targets, out)


class DeltaRule:
    """The gated delta rule with a layer's own decays; ``decay_log`` and ``bias`` as checkpoints have them (A_log and
    dt_bias)."""

    def __init__(self, parts: ModelParts, decay_log: torch.Tensor, bias: torch.Tensor) -> None:
        linear = linear_of(parts.config)
        self._rate = decay_log.exp()
        self._bias = bias.view(linear.value_heads, linear.key_dim) if linear.channel_decay else bias
        self._rule = parts.kernels.gated_delta(
            key_dim=linear.key_dim,
            value_dim=linear.value_dim,
            v_per_k=linear.value_heads // linear.key_heads,
            decay="channel" if linear.channel_decay else "head",
        )

    def bind_cache(self, matrix: torch.Tensor) -> None:
        """``matrix``: the field of the state group."""
        self._state = matrix

    def forward(
        self, rows: StateRows, qkv: Sequence[torch.Tensor], decay: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Writes ``out`` float32 [T, value heads, value_dim]; decay and beta before their functions."""
        q, k, v = qkv
        self._rule(
            q, k, v, decay, beta, self._rate, self._bias, UNIT_EPS, self._state, rows.starts, rows.sources,
            rows.targets, out,
        )  # fmt: skip


def state_of(caches: Sequence[LayerCache]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The group of a layer with a state, the inputs of its convolution, and its matrices."""
    (cache,) = caches
    return cache.group, cache.fields["inputs"], cache.fields["matrix"]
