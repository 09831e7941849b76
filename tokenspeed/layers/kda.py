"""Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each channel of a key."""

from collections.abc import Sequence

import torch

from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.recurrent import Convolution, DeltaRule, linear_of, state_of
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

_PARTS = ("q", "k", "v")


def kda_weights(config: ModelConfig, place: str, ranks: Ranks) -> list[WeightSpec]:
    """All of a layer at ``place`` ("model.layers.0.self_attn"); decay and gate come through a rank of one head."""
    linear, hidden = linear_of(config), config.hidden_size
    heads, rank = linear.value_heads, linear.key_dim
    keys, values = linear.key_heads * linear.key_dim, heads * linear.value_dim
    widths = dict(zip(_PARTS, (keys, keys, values), strict=True))
    specs = [ranks.rows(f"{place}.{part}_proj.weight", width, hidden) for part, width in widths.items()]
    specs += [
        ranks.rows(
            f"{place}.{part}_conv1d.weight",
            width,
            linear.conv_width,
            stored=(width, 1, linear.conv_width),
            is_float=True,
        )
        for part, width in widths.items()
    ]
    return [
        *specs,
        ranks.rows(f"{place}.A_log", heads, stored=(1, 1, heads, 1)),
        ranks.rows(f"{place}.dt_bias", heads * linear.key_dim),
        ranks.whole(f"{place}.f_a_proj.weight", rank, hidden),
        ranks.rows(f"{place}.f_b_proj.weight", heads * linear.key_dim, rank),
        ranks.rows(f"{place}.b_proj.weight", heads, hidden),
        ranks.whole(f"{place}.g_a_proj.weight", rank, hidden),
        ranks.rows(f"{place}.g_b_proj.weight", values, rank),
        ranks.whole(f"{place}.o_norm.weight", linear.value_dim),
        ranks.columns(f"{place}.o_proj.weight", hidden, values),
    ]


class KimiDeltaAttention:
    """Twelve kernel calls a step, or two more where q, k and v do not join."""

    def __init__(self, parts: ModelParts, place: str) -> None:
        config, workspace = parts.config, parts.workspace
        linear = linear_of(config)
        keys, values = (linear.key_heads, linear.key_dim), (linear.value_heads, linear.value_dim)
        shapes = (keys, keys, values)
        self._eps = config.rms_norm_eps
        self._project = parts.stacked([f"{place}.{part}_proj" for part in _PARTS]).forward
        self._convolutions, first = [], 0
        for part in _PARTS:
            weight = parts.vector(f"{place}.{part}_conv1d.weight")
            self._convolutions.append(Convolution(parts, weight, first))
            first += weight.shape[0]
        self._rule = DeltaRule(parts, parts.vector(f"{place}.A_log"), parts.vector(f"{place}.dt_bias"))
        self._to_decay, self._to_gate = (
            (parts.linear(f"{place}.{name}_a_proj", "replicated"), parts.linear(f"{place}.{name}_b_proj", "rows"))
            for name in ("f", "g")
        )
        self._to_beta = parts.linear(f"{place}.b_proj", "rows")
        self._norm_weight = parts.vector(f"{place}.o_norm.weight")
        self._norm = parts.kernels.gated_rms_norm(gate="sigmoid")
        self._output = parts.linear(f"{place}.o_proj", "columns")
        self._projected = workspace.stacked("projected", tuple((heads * width,) for heads, width in shapes))
        self._mixed = workspace.stacked("convolved", shapes)
        self._rank = workspace.rows("rank", linear.key_dim)
        self._decay = workspace.rows("decay", linear.value_heads, linear.key_dim)
        self._flat_decay = workspace.rows("decay", linear.value_heads * linear.key_dim)
        self._beta = workspace.rows("beta", linear.value_heads)
        self._gate = workspace.rows("gate", *values)
        self._flat_gate = workspace.rows("gate", linear.value_heads * linear.value_dim)
        self._heads = workspace.rows("heads", *values)
        self._flat_heads = workspace.rows("heads", linear.value_heads * linear.value_dim)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its part of the arena: the state of one group."""
        self._group, inputs, matrix = state_of(caches)
        for convolution in self._convolutions:
            convolution.bind_cache(inputs)
        self._rule.bind_cache(matrix)

    def forward(self, batch: ForwardBatch, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], and the rows' states."""
        tokens = x.shape[0]
        mixed, rank, beta, heads = self._mixed(tokens), self._rank(tokens), self._beta(tokens), self._heads(tokens)
        projected = self._project(x, self._projected(tokens))
        for (down, up), wide in ((self._to_decay, self._flat_decay), (self._to_gate, self._flat_gate)):
            down(x, rank)
            up(rank, wide(tokens))
        self._to_beta(x, beta)
        batch.apart(self._scan, projected, mixed.separate, mixed.separate_parts, self._decay(tokens), beta, heads)
        self._norm(heads, self._gate(tokens), self._norm_weight, self._eps, False, heads)
        self._output(self._flat_heads(tokens), out)

    def _scan(
        self,
        batch: ForwardBatch,
        projected: Sequence[torch.Tensor],
        convolved: Sequence[torch.Tensor],
        qkv: Sequence[torch.Tensor],
        decay: torch.Tensor,
        beta: torch.Tensor,
        heads: torch.Tensor,
    ) -> None:
        """Takes the tokens of each row one after another: the convolutions, then the rule. ``convolved`` and ``qkv``
        are one memory in two shapes."""
        rows = batch.attention[self._group].state_rows
        for convolution, part, out in zip(self._convolutions, projected, convolved, strict=True):
            convolution.forward(rows, part, out)
        self._rule.forward(rows, qkv, decay, beta, heads)
