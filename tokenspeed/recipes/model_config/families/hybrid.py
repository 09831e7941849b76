"""Decoders of which most layers keep a state in place of keys and values: Qwen3-Next, Qwen3.5 and what follows, Kimi
Linear."""

from collections.abc import Sequence
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.families.latent import read_latent
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, check_layer_types, decoder
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ExpertsConfig, LinearAttentionConfig, ModelConfig, RopeConfig

_LINEAR, _FULL = "linear_attention", "full_attention"


def _linear_layers(fields: Fields, *, interval: int) -> tuple[int, ...]:
    """Those that layer_types names, else all but every ``interval``-th; CheckpointError where no layer of either kind
    is left, as that is no model of these families."""
    count = fields.integer("num_hidden_layers")
    types: Sequence[object] | None = fields.values.get("layer_types")
    if types is None:
        types = [_FULL if (layer + 1) % interval == 0 else _LINEAR for layer in range(count)]
    check_layer_types(fields, list(types), (_LINEAR, _FULL))
    found = tuple(layer for layer, kind in enumerate(types) if kind == _LINEAR)
    if not 0 < len(found) < count:
        raise CheckpointError(
            f"{fields.where}: {len(found)} of {count} layers are {_LINEAR}; these families have layers of both kinds"
        )
    return found


def _gated_delta(fields: Fields) -> LinearAttentionConfig:
    interval = fields.integer("full_attention_interval", 4)
    found = LinearAttentionConfig(
        layers=_linear_layers(fields, interval=interval),
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
    )
    return _checked(fields, found)


def _checked(fields: Fields, found: LinearAttentionConfig) -> LinearAttentionConfig:
    sizes = (found.key_heads, found.value_heads, found.key_dim, found.value_dim)
    if min(sizes) < 1 or found.conv_width < 2:
        raise CheckpointError(
            f"{fields.where}: linear attention has heads and dimensions {sizes} and a convolution of "
            f"{found.conv_width}; they should be at least 1, and 2"
        )
    if found.value_heads % found.key_heads:
        raise CheckpointError(
            f"{fields.where}: {found.value_heads} value heads of linear attention are not a multiple of its "
            f"{found.key_heads} key heads"
        )
    return found


def _qwen(fields: Fields, generation: Generation, architecture: str, **own: Any) -> ModelConfig:
    """What Qwen3-Next began: gated attention with partial rotary, norms stored as what they have beyond 1."""
    fields.refuse_unless("hidden_act", ("silu",))
    return decoder(
        fields,
        generation,
        architecture,
        head_dim=fields.integer("head_dim", 256),
        rope=read_rope(fields, share=0.25),
        qk_norm=True,
        output_gate=True,
        norm_offset=1.0,
        linear=_gated_delta(fields),
        ignored_weights=(r"(model\.)?mtp\..*", r"model\.visual\..*", r"visual\..*"),
        **own,
    )


def _qwen_experts(
    fields: Fields, layers: tuple[int, ...], *, count: int, active: int, renormalise: bool
) -> ExpertsConfig:
    return ExpertsConfig(
        layers=layers,
        count=fields.integer("num_experts", count),
        active=fields.integer("num_experts_per_tok", active),
        intermediate=fields.integer("moe_intermediate_size", 512),
        shared_intermediate=fields.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
        renormalise=renormalise,
    )


def qwen3_next(fields: Fields, generation: Generation) -> ModelConfig:
    """Qwen3-Next: experts in every layer, or in every n-th that is not among mlp_only_layers."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    layers = tuple(
        layer for layer in range(fields.integer("num_hidden_layers")) if layer not in dense and (layer + 1) % step == 0
    )
    renormalise = fields.flag("norm_topk_prob", True)
    experts = _qwen_experts(fields, layers, count=512, active=10, renormalise=renormalise) if layers else None
    return _qwen(fields, generation, "qwen3_next", experts=experts)


def _text(fields: Fields) -> Fields:
    """The decoder of a model that takes pictures too, whose encoder is left out; else the whole."""
    if "text_config" not in fields.values:
        return fields
    text = fields.part("text_config")
    # transformers writes this one beside the parts; where the decoder says nothing, it is its.
    tied = text.values.get("tie_word_embeddings", fields.values.get("tie_word_embeddings"))
    return Fields(text.where, {**text.values, "tie_word_embeddings": tied})


def qwen3_5(fields: Fields, generation: Generation) -> ModelConfig:
    """The text model of Qwen3.5 to 3.8, dense. Its multimodal rotary embedding is the plain one where all tokens are
    text."""
    return _qwen(_text(fields), generation, "qwen3_5")


def qwen3_5_moe(fields: Fields, generation: Generation) -> ModelConfig:
    """The same with experts in every layer, and no dense MLP beside them."""
    text = _text(fields)
    layers = tuple(range(text.integer("num_hidden_layers")))
    experts = _qwen_experts(text, layers, count=256, active=8, renormalise=True)
    intermediate = text.integer("intermediate_size", experts.intermediate)
    return _qwen(text, generation, "qwen3_5_moe", experts=experts, intermediate_size=intermediate)


def _kimi_linear_layers(fields: Fields) -> tuple[int, ...]:
    """Those that linear_attn_config counts from 1, else those that layer_types names, else all but every fourth behind
    the first."""
    count = fields.integer("num_hidden_layers")
    listed = fields.part("linear_attn_config").values if "linear_attn_config" in fields.values else {}
    if listed.get("kda_layers") is not None and fields.values.get("layer_types") is None:
        linear, full = (set(listed.get(key) or []) for key in ("kda_layers", "full_attn_layers"))
        if linear & full or linear | full != set(range(1, count + 1)) or not linear or not full:
            raise CheckpointError(
                f"{fields.where}: linear_attn_config: kda_layers and full_attn_layers hold {sorted(linear)} and "
                f"{sorted(full)}; together they name each of the layers 1 to {count} once, and both name some"
            )
        return tuple(sorted(layer - 1 for layer in linear))
    types = fields.values.get("layer_types") or [_FULL if i and i % 4 == 0 else _LINEAR for i in range(count)]
    return _linear_layers(Fields(fields.where, {**fields.values, "layer_types": types}), interval=4)


def _kimi_delta(fields: Fields) -> LinearAttentionConfig:
    own = fields.part("linear_attn_config") if "linear_attn_config" in fields.values else Fields(fields.where, {})
    heads = own.integer("num_heads", fields.integer("linear_num_heads", 32))
    dim = own.integer("head_dim", fields.integer("linear_head_dim", 128))
    found = LinearAttentionConfig(
        layers=_kimi_linear_layers(fields),
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=own.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4)),
        channel_decay=True,
    )
    return _checked(fields, found)


def _kimi_experts(fields: Fields) -> ExpertsConfig | None:
    """Those of DeepSeek-V3 under other names."""
    fields.refuse_unless("moe_router_activation_func", ("sigmoid",))
    fields.refuse_unless("moe_layer_freq", (1,))
    count = fields.integer("num_hidden_layers")
    kinds = fields.words("mlp_layer_types", count)
    if kinds is None:
        dense = fields.integer("first_k_dense_replace", 1)
        kinds = ["dense" if layer < dense else "sparse" for layer in range(count)]
    unknown = sorted(set(kinds) - {"dense", "sparse"})
    if unknown:
        raise CheckpointError(f"{fields.where}: mlp_layer_types holds {unknown}; supported are dense and sparse")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if not layers:
        return None
    intermediate = fields.integer("moe_intermediate_size", 1024)
    return ExpertsConfig(
        layers=layers,
        count=fields.integer("num_experts", 256),
        active=fields.integer("num_experts_per_token", 8),
        intermediate=intermediate,
        shared_intermediate=fields.integer("num_shared_experts", 1) * intermediate,
        scoring="sigmoid",
        corrected=True,
        groups=fields.integer("num_expert_group", 1),
        top_groups=fields.integer("topk_group", 1),
        renormalise=fields.flag("moe_renormalize", True),
        scale=fields.number("routed_scaling_factor", 2.446),
    )


def kimi_linear(fields: Fields, generation: Generation) -> ModelConfig:
    """Kimi Linear: Kimi Delta Attention, and latent attention that knows no positions but by it."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("mla_use_nope", (True,))
    latent, layers = read_latent(fields), fields.integer("num_hidden_layers")
    length = fields.integer("model_max_length", fields.integer("max_position_embeddings", 0))
    drafts = range(layers, layers + fields.integer("num_nextn_predict_layers", 0))
    return decoder(
        Fields(fields.where, {**fields.values, "max_position_embeddings": length}),
        generation,
        "kimi_linear",
        head_dim=latent.plain + latent.rotary,
        latent=latent,
        rope=RopeConfig(kind="none"),
        tie_word_embeddings=False,  # whatever the configuration says, these models have a head of their own
        experts=_kimi_experts(fields),
        linear=_kimi_delta(fields),
        ignored_weights=tuple(rf"model\.layers\.{layer}\..*" for layer in drafts),
    )
