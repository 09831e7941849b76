"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed: queries go to the latents, heads come back.

The up-projection of keys and values is never applied to the cache: its key part is folded into the queries, its value
part into what attention over the latents gives.
"""

from collections.abc import Sequence

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.rotary import score_factor
from tokenspeed.layers.weights import Ranks, WeightSpec, paired_rotary_rows
from tokenspeed.recipes.model_config import LatentConfig, ModelConfig
from tokenspeed_kernel.quantized import QuantizedTensor

LATENT_EPS = 1e-6
"""Of the norms of compressed query and latent: part of the architecture, whatever a configuration says of the other
norms."""


def latent_of(config: ModelConfig) -> LatentConfig:
    """The dimensions of latent attention; ValueError where the model has none."""
    if config.latent is None:
        raise ValueError(f"{config.architecture}: the configuration has no latent attention")
    return config.latent


def latent_attention_weights(config: ModelConfig, place: str, ranks: Ranks) -> list[WeightSpec]:
    """Projections and norms at ``place``; ranks share the heads, the compressed query and cache are on all of them."""
    latent, hidden, heads = latent_of(config), config.hidden_size, config.num_heads
    head = latent.plain + latent.rotary
    turned = paired_rotary_rows(head, latent.rotary, start=latent.plain)
    specs = []
    if latent.query_rank:
        specs += [
            ranks.whole(f"{place}.q_a_proj.weight", latent.query_rank, hidden),
            ranks.whole(f"{place}.q_a_layernorm.weight", latent.query_rank),
            ranks.rows(f"{place}.q_b_proj.weight", heads * head, latent.query_rank, row_order=turned),
        ]
    else:
        specs.append(ranks.rows(f"{place}.q_proj.weight", heads * head, hidden, row_order=turned))
    compressed = latent.latent + latent.rotary
    specs += [
        ranks.whole(
            f"{place}.kv_a_proj_with_mqa.weight",
            compressed,
            hidden,
            row_order=paired_rotary_rows(compressed, latent.rotary, start=latent.latent),
        ),
        ranks.whole(f"{place}.kv_a_layernorm.weight", latent.latent),
        ranks.rows(f"{place}.kv_b_proj.weight", heads * (latent.plain + latent.value), latent.latent),
        ranks.columns(f"{place}.o_proj.weight", hidden, heads * latent.value),
    ]
    return specs


def latent_attention_spec(config: ModelConfig) -> AttentionSpec:
    """How a group of latents attends."""
    latent = latent_of(config)
    scale = (latent.plain + latent.rotary) ** -0.5 * score_factor(config.rope)
    return AttentionSpec(backend="paged_mla", num_heads=config.num_heads, latent_dim=latent.latent, scale=scale)


class LatentAttention:
    """Eight kernel calls a step, two less where queries are not compressed, one more where they grow."""

    def __init__(self, parts: ModelParts, place: str) -> None:
        config, workspace, kernels = parts.config, parts.workspace, parts.kernels
        latent, heads = latent_of(config), config.num_heads
        plain, rotary, width = latent.plain, latent.rotary, latent.latent
        self._plain = plain
        self._eps = LATENT_EPS
        self._cos_sin = parts.rotary(config.rope, rotary)
        # Where nothing is rotated, the table has one row, which turns by no angle, for every token.
        self._no_positions = workspace.integers("no_positions") if config.rope.kind == "none" else None
        self._growth: torch.Tensor | None = None
        if latent.growth:
            self._growth = parts.growth(latent)
            self._scale_rows = kernels.scale_rows()
        self._compress_query = None
        if latent.query_rank:
            self._compress_query = parts.linear(f"{place}.q_a_proj", "replicated")
            self._query_norm = parts.vector(f"{place}.q_a_layernorm.weight")
            self._rms_norm = kernels.rms_norm()
            self._compressed_query = workspace.rows("compressed_query", latent.query_rank)
        self._query = parts.linear(f"{place}.{'q_b_proj' if latent.query_rank else 'q_proj'}", "rows")
        self._compress = parts.linear(f"{place}.kv_a_proj_with_mqa", "replicated")
        self._latent_norm = parts.vector(f"{place}.kv_a_layernorm.weight")
        keys, values = split_up_projection(parts.weights.matrices[f"{place}.kv_b_proj.weight"], heads, latent)
        self._to_latent = kernels.head_linear(keys, heads)
        self._to_value = kernels.head_linear(values, heads)
        self._output = parts.linear(f"{place}.o_proj", "columns")
        self._prologue = kernels.mla_prologue(
            latent_dim=width, rotary_dim=rotary, plain_dim=plain, kv_dtype=parts.kv_dtype
        )
        self._q = workspace.rows("q", heads, plain + rotary)
        self._flat_q = workspace.rows("q", heads * (plain + rotary))
        self._compressed = workspace.rows("compressed", width + rotary)
        self._q_latent = workspace.rows("q_latent", heads, width)
        self._attended = workspace.rows("attended", heads, width)
        self._heads = workspace.rows("heads", heads, latent.value)
        self._flat_heads = workspace.rows("heads", heads * latent.value)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its part of the arena: the latents of one group."""
        (cache,) = caches
        self._group, self._place = cache.group, cache.place
        self._cache = cache.fields["latent"]

    def forward(self, batch: ForwardBatch, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], and the tokens' latents to the cache."""
        tokens = x.shape[0]
        if self._compress_query is None:
            self._query(x, self._flat_q(tokens))
        else:
            compressed_query = self._compressed_query(tokens)
            self._compress_query(x, compressed_query)
            self._rms_norm(compressed_query, self._query_norm, self._eps, compressed_query)
            self._query(compressed_query, self._flat_q(tokens))
        q, compressed = self._q(tokens), self._compressed(tokens)
        self._compress(x, compressed)
        positions = batch.positions if self._no_positions is None else self._no_positions(tokens)
        self._prologue(
            q, compressed, positions, self._cos_sin, self._latent_norm, self._eps, self._cache,
            batch.slots[self._group],
        )  # fmt: skip
        if self._growth is not None:
            self._scale_rows(self._flat_q(tokens), self._growth, batch.positions, self._flat_q(tokens))
        q_latent, attended = self._q_latent(tokens), self._attended(tokens)
        self._to_latent(q[..., : self._plain], q_latent)
        self._attend(batch, x, q_latent, q[..., self._plain :], attended)
        self._to_value(attended, self._heads(tokens))
        self._output(self._flat_heads(tokens), out)

    def _attend(
        self,
        batch: ForwardBatch,
        x: torch.Tensor,  # noqa: ARG002 - layers that choose what to attend to look at it
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        batch.attention[self._group].attend_latent(self._place, q_latent, q_rope, out)


def split_up_projection(
    weight: QuantizedTensor, heads: int, latent: LatentConfig
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The up-projection [heads * (plain + value), latent] as what takes queries to the latents, [heads * latent,
    plain], and what takes the latents to values, [heads * value, latent].

    The first is a transpose, which blocks of a quantised format do not survive: it is kept in bfloat16 then.
    """
    head = latent.plain + latent.value
    rows = torch.arange(heads * head).view(heads, head)
    values = weight.select_rows(rows[:, latent.plain :].reshape(-1))
    keys = weight.select_rows(rows[:, : latent.plain].reshape(-1))
    dense = keys.dequantize().to(torch.bfloat16) if keys.is_blocked else keys.plane
    turned = dense.view(heads, latent.plain, latent.latent).transpose(1, 2).reshape(-1, latent.plain).contiguous()
    return QuantizedTensor.from_dense(turned, f"{weight.source}: transposed keys"), values
