"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in both its forms, over one cache of latents.

Absorbed, queries go to the latents and heads come back: the key part of the up-projection is folded into the queries,
its value part into what attention over the latents gives. Expanded, the up-projection makes keys and values of the
latents. A pair of a query and a key costs a third then, a key before the tokens of a step much more: long chunks of
prompts are expanded, short ones behind a long prefix and decoding tokens are absorbed (AttentionSpec.expands). Both
read the up-projection as it lies; absorbed queries need its part for keys transposed besides.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.decoder import DecoderLayer
from tokenspeed.layers.kernel_choice import Kernel
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


def latent_attention_spec(config: ModelConfig, layers: Sequence[DecoderLayer] = ()) -> AttentionSpec:
    """How a group of latents attends; expanded where it pays and all latent attention of ``layers``, whose caches are
    bound, can."""
    latent = latent_of(config)
    scale = (latent.plain + latent.rotary) ** -0.5 * score_factor(config.rope)
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, LatentAttention)]
    return AttentionSpec(
        backend="paged_mla",
        num_heads=config.num_heads,
        latent_dim=latent.latent,
        pairs_per_expansion=pairs_per_expansion(latent) if mixers and all(m.expands for m in mixers) else 0.0,
        scale=scale,
    )


def pairs_per_expansion(latent: LatentConfig) -> float:
    """See AttentionSpec: the multiply-adds that expand a key and its value, over those that a pair then has less; 0.0
    where it has none less."""
    key_and_value = latent.plain + latent.value
    saved = 2 * latent.latent - key_and_value
    return latent.latent * key_and_value / saved if saved > 0 else 0.0


class LatentAttention:
    """Eight kernel calls a step, six where all rows are expanded and nine where some are; two less where queries are
    not compressed, one more where they grow.

    ``may_expand``: whether keys and values are expanded where that pays.
    """

    def __init__(self, parts: ModelParts, place: str, *, may_expand: bool = True) -> None:
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
        up = parts.matrix(f"{place}.kv_b_proj.weight")
        turned = parts.keep(turned_keys(up, heads, latent))
        self._to_latent = kernels.head_linear(turned, heads)
        self._to_value = kernels.head_linear(up, heads, skipped=plain)
        self._bind_expanded: Callable[..., Kernel | None] | None = None
        if may_expand and pairs_per_expansion(latent) > 0.0:
            self._bind_expanded = partial(
                kernels.mla_extend_expanded, up, heads, rotary_dim=rotary, plain_dim=plain, kv_dtype=parts.kv_dtype
            )
        self._expanded: Kernel | None = None
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

    @property
    def expands(self) -> bool:
        """Whether there is a kernel that expands keys and values; none before the cache is bound."""
        return self._expanded is not None

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its part of the arena: the latents of one group."""
        (cache,) = caches
        self._group, self._place = cache.group, cache.place
        self._cache = cache.fields["latent"]
        if self._bind_expanded is not None:
            self._expanded = self._bind_expanded(page=self._cache.shape[2])
            self._bind_expanded = None  # which holds the weight

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
        batch.apart(self._attend, x, q, self._heads(tokens))
        self._output(self._flat_heads(tokens), out)

    def _attend(
        self,
        batch: ForwardBatch,
        x: torch.Tensor,  # noqa: ARG002 - layers that choose what to attend to look at it
        q: torch.Tensor,
        heads: torch.Tensor,
    ) -> None:
        """Writes ``heads`` float32 [T, heads, value] of ``q`` float32 [T, heads, plain + rotary]."""
        tokens, plain, attention = q.shape[0], self._plain, batch.attention[self._group]
        if self._expanded is not None:
            attention.attend_expanded(self._place, self._expanded, q, heads)
        q_latent, attended = self._q_latent(tokens), self._attended(tokens)
        absorbed = attention.absorbed
        for part in absorbed:
            self._to_latent(q[part, :, :plain], q_latent[part])
        attention.attend_latent(self._place, q_latent, q[..., plain:], attended)
        for part in absorbed:
            self._to_value(attended[part], heads[part])


def turned_keys(weight: QuantizedTensor, heads: int, latent: LatentConfig) -> QuantizedTensor:
    """The part of the up-projection [heads * (plain + value), latent] that makes keys as what takes queries to the
    latents, [heads * latent, plain], a copy.

    It is a transpose, which blocks of a quantised format do not survive: it is kept in bfloat16 then.
    """
    head = latent.plain + latent.value
    rows = torch.arange(heads * head, device=weight.plane.device).view(heads, head)
    keys = weight.select_rows(rows[:, : latent.plain].reshape(-1))
    dense = keys.dequantize().to(torch.bfloat16) if keys.is_blocked else keys.plane
    turned = dense.view(heads, latent.plain, latent.latent).transpose(1, 2).reshape(-1, latent.plain).contiguous()
    return QuantizedTensor.from_dense(turned, f"{weight.source}: transposed keys")
