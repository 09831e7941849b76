"""What a dense decoder of the llama shape declares: its weights (names, shapes, shards) and its cache groups."""

from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.layers.shard import Shard, ShardKind
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def dense_decoder_cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """Keys and values in blocks of ``granularity`` tokens: of every token in the layers that see the whole sequence, of
    the last ``config.sliding_window`` tokens in the others. A group without layers is left out."""
    fields = tuple(CacheFieldSpec(name=name, heads=config.num_kv_heads, dim=config.head_dim) for name in ("k", "v"))
    full = tuple(layer for layer in range(config.num_layers) if layer not in config.sliding_layers)
    groups = []
    if full:
        groups.append(
            CacheGroupSpec(
                group_id="attention",
                kind="full_history",
                layers=full,
                fields=fields,
                rows_per_page=granularity,
                entry_stride_tokens=1,
            )
        )
    if config.sliding_layers:
        groups.append(
            CacheGroupSpec(
                group_id="sliding_attention",
                kind="sliding_window",
                layers=config.sliding_layers,
                fields=fields,
                rows_per_page=granularity,
                entry_stride_tokens=1,
                sliding_window_tokens=config.sliding_window,
            )
        )
    return tuple(groups)


def dense_decoder_weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Every weight of the model, in the order of the forward.

    Heads and intermediate columns are divided among ranks, norms are replicated, the vocabulary is divided by rows.
    """
    specs = [_spec("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), "rows", rank, world)]
    for layer in range(config.num_layers):
        specs += _layer(config, f"model.layers.{layer}", rank, world)
    specs.append(_spec("model.norm.weight", (config.hidden_size,), "replicated", rank, world))
    if not config.tie_word_embeddings:
        specs.append(_spec("lm_head.weight", (config.vocab_size, config.hidden_size), "rows", rank, world))
    return tuple(specs)


def _layer(config: ModelConfig, prefix: str, rank: int, world: int) -> list[WeightSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    specs = [_spec(f"{prefix}.input_layernorm.weight", (hidden,), "replicated", rank, world)]
    for name, rows, heads in (("q", queries, config.num_heads), ("k", keys, config.num_kv_heads), ("v", keys, 0)):
        specs.append(_spec(f"{attention}.{name}_proj.weight", (rows, hidden), "rows", rank, world, heads))
        if config.attention_bias:
            specs.append(_spec(f"{attention}.{name}_proj.bias", (rows,), "rows", rank, world, heads))
        if config.qk_norm and heads:
            specs.append(_spec(f"{attention}.{name}_norm.weight", (config.head_dim,), "replicated", rank, world))
    specs.append(_spec(f"{attention}.o_proj.weight", (hidden, queries), "columns", rank, world))
    if config.attention_bias:
        specs.append(_spec(f"{attention}.o_proj.bias", (hidden,), "replicated", rank, world))
    specs.append(_spec(f"{prefix}.post_attention_layernorm.weight", (hidden,), "replicated", rank, world))
    for name, shape, kind in (
        ("gate", (inner, hidden), "rows"),
        ("up", (inner, hidden), "rows"),
        ("down", (hidden, inner), "columns"),
    ):
        specs.append(_spec(f"{mlp}.{name}_proj.weight", shape, kind, rank, world))
        if config.mlp_bias:
            bias_kind = "rows" if kind == "rows" else "replicated"
            specs.append(_spec(f"{mlp}.{name}_proj.bias", shape[:1], bias_kind, rank, world))
    return specs


def _spec(name: str, shape: tuple[int, ...], kind: str, rank: int, world: int, rotary_heads: int = 0) -> WeightSpec:
    shard_kind: ShardKind = "rows" if kind == "rows" else "columns" if kind == "columns" else "replicated"
    shard = Shard(kind=shard_kind, rank=rank, world=world)
    return WeightSpec(name=name, shape=shape, shard=shard, rotary_heads=rotary_heads)
