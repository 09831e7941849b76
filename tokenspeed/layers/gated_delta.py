"""Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 have it: projections, a short convolution, the gated
delta rule, a gated norm, output."""

from collections.abc import Sequence
from typing import Protocol

import torch

from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.recurrent import Convolution, DeltaRule, linear_of, state_of
from tokenspeed.layers.weights import Ranks, RowOrder, WeightSpec
from tokenspeed.recipes.model_config import LinearAttentionConfig, ModelConfig


def gated_delta_weights(config: ModelConfig, place: str, ranks: Ranks, *, by_key_heads: bool) -> list[WeightSpec]:
    """All of a layer at ``place`` ("model.layers.0.linear_attn"). ``by_key_heads``: the checkpoint has the rows of a
    key head, of its value heads and of their gates together (Qwen3-Next), else in matrices of their own."""
    linear, hidden = linear_of(config), config.hidden_size
    heads, values = linear.value_heads, linear.value_heads * linear.value_dim
    keys = linear.key_heads * linear.key_dim
    channels = (keys, keys, values)  # queries, keys and values, of each of which a rank has its heads
    specs = [
        ranks.rows(f"{place}.A_log", heads),
        ranks.rows(f"{place}.dt_bias", heads),
        ranks.rows(
            f"{place}.conv1d.weight",
            linear.channels,
            linear.conv_width,
            stored=(linear.channels, 1, linear.conv_width),
            is_float=True,
            sections=channels,
        ),
    ]
    if by_key_heads:
        mixed, gates = _key_head_rows(linear, matrix=True), _key_head_rows(linear, matrix=False)
        specs += [
            ranks.rows(f"{place}.in_proj_qkvz.weight", linear.channels + values, hidden, row_order=mixed),
            ranks.rows(f"{place}.in_proj_ba.weight", 2 * heads, hidden, row_order=gates),
        ]
    else:
        specs += [
            ranks.rows(f"{place}.in_proj_{name}.weight", sum(sections), hidden, sections=sections)
            for name, sections in (("a", (heads,)), ("b", (heads,)), ("qkv", channels), ("z", (values,)))
        ]
    specs.append(ranks.whole(f"{place}.norm.weight", linear.value_dim))
    specs.append(ranks.columns(f"{place}.out_proj.weight", hidden, values))
    return specs


def _key_head_rows(linear: LinearAttentionConfig, *, matrix: bool) -> RowOrder:
    """Where the rows of all q, k, v and z (``matrix``), or of all b and a, lie among those put by key heads."""
    shared = linear.value_heads // linear.key_heads
    widths = [linear.key_dim] * 2 + [shared * linear.value_dim] * 2 if matrix else [shared] * 2

    def order(rows: int) -> torch.Tensor:
        whole = torch.arange(rows).view(-1, sum(widths))
        return torch.cat([part.reshape(-1) for part in torch.split(whole, widths, dim=1)])

    return order


class _Projections(Protocol):
    """Of x float32 [T, H]: what the convolution takes [T, channels], the norm's gate [T, heads, value_dim], decay and
    beta [T, heads] before their functions; views whose rows are apart."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...


def _projections(parts: ModelParts, place: str) -> _Projections:
    linear, workspace = linear_of(parts.config), parts.workspace
    heads, channels = linear.value_heads, linear.channels
    gate = (heads, linear.value_dim)
    if f"{place}.in_proj_qkvz.weight" in parts.weights.matrices:
        both = parts.stacked([f"{place}.in_proj_qkvz", f"{place}.in_proj_ba"]).forward
        memory = workspace.stacked("projected", ((channels + heads * linear.value_dim,), (2, heads)))

        def by_key_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            mixed, gates = both(x, memory(x.shape[0]))
            return mixed[:, :channels], mixed[:, channels:].view(-1, *gate), gates[:, 1], gates[:, 0]

        return by_key_heads
    # In the order of their names, in which they lie in a file: joined without a copy, they are one product.
    each = parts.stacked([f"{place}.in_proj_{name}" for name in ("a", "b", "qkv", "z")]).forward
    apart = workspace.stacked("projected", ((heads,), (heads,), (channels,), gate))

    def separate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        decay, beta, mixed, gates = each(x, apart(x.shape[0]))
        return mixed, gates, decay, beta

    return separate


class GatedDeltaNet:
    """Six kernel calls a step, or up to three more where weights do not join."""

    def __init__(self, parts: ModelParts, place: str) -> None:
        config, workspace = parts.config, parts.workspace
        linear = linear_of(config)
        keys, values = (linear.key_heads, linear.key_dim), (linear.value_heads, linear.value_dim)
        self._eps = config.rms_norm_eps
        self._project = _projections(parts, place)
        self._convolution = Convolution(parts, parts.vector(f"{place}.conv1d.weight"))
        self._rule = DeltaRule(parts, parts.vector(f"{place}.A_log"), parts.vector(f"{place}.dt_bias"))
        self._norm_weight = parts.vector(f"{place}.norm.weight")
        self._norm = parts.kernels.gated_rms_norm(gate="silu")
        self._output = parts.linear(f"{place}.out_proj", "columns")
        self._mixed = workspace.stacked("convolved", (keys, keys, values))
        self._heads = workspace.rows("heads", *values)
        self._flat_heads = workspace.rows("heads", linear.value_heads * linear.value_dim)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its part of the arena: the state of one group."""
        self._group, inputs, matrix = state_of(caches)
        self._convolution.bind_cache(inputs)
        self._rule.bind_cache(matrix)

    def forward(self, batch: ForwardBatch, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], and the rows' states."""
        tokens = x.shape[0]
        mixed, gate, decay, beta = self._project(x)
        convolved, heads = self._mixed(tokens), self._heads(tokens)
        batch.apart(self._scan, mixed, convolved.whole, convolved.whole_parts, decay, beta, heads)
        self._norm(heads, gate, self._norm_weight, self._eps, True, heads)
        self._output(self._flat_heads(tokens), out)

    def _scan(
        self,
        batch: ForwardBatch,
        mixed: torch.Tensor,
        convolved: torch.Tensor,
        qkv: Sequence[torch.Tensor],
        decay: torch.Tensor,
        beta: torch.Tensor,
        heads: torch.Tensor,
    ) -> None:
        """Takes the tokens of each row one after another: the convolution, then the rule. ``convolved`` and ``qkv`` are
        one memory in two shapes."""
        rows = batch.attention[self._group].state_rows
        self._convolution.forward(rows, mixed, convolved)
        self._rule.forward(rows, qkv, decay, beta, heads)
