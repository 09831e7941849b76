"""Decoders with grouped-query attention and a mixture of experts."""

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder, read_windows
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ExpertsConfig, ModelConfig


def qwen3_moe(fields: Fields, generation: Generation) -> ModelConfig:
    """Qwen3 with experts in every layer, or in every n-th that is not among mlp_only_layers."""
    fields.refuse_unless("hidden_act", ("silu",))
    window, sliding = read_windows(fields, allowed=True)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    layers = range(fields.integer("num_hidden_layers"))
    experts = ExpertsConfig(
        layers=tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        count=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        active=fields.integer("num_experts_per_tok", 8),
        intermediate=fields.integer("moe_intermediate_size", 768),
        renormalise=fields.flag("norm_topk_prob", False),
    )
    return decoder(
        fields,
        generation,
        "qwen3_moe",
        qk_norm=True,
        sliding_window=window,
        sliding_layers=sliding,
        experts=experts if experts.layers else None,
    )


def ernie4_5_moe(fields: Fields, generation: Generation) -> ModelConfig:
    """ERNIE 4.5's text models: rotary pairs side by side, experts by softmax with a correction; what drafts tokens is
    left out."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("use_bias", (False,))
    fields.refuse_unless("moe_gate", ("topk",))
    fields.refuse_unless("moe_norm_min", (1e-12,))  # no chosen scores are so small that it would show
    inner = fields.integer("moe_intermediate_size", 1536)
    experts = ExpertsConfig(
        layers=_ernie_experts_layers(fields),
        count=fields.integer("moe_num_experts", 64),
        active=fields.integer("moe_k", 6),
        intermediate=inner,
        shared_intermediate=fields.integer("moe_num_shared_experts", 2) * inner,
        corrected=fields.flag("moe_use_aux_free", True),
    )
    return decoder(
        fields,
        generation,
        "ernie4_5_moe",
        attention_bias=False,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        rope=read_rope(fields, theta=500000.0, paired=True),
        experts=experts if experts.layers else None,
        ignored_weights=(r"model\.mtp_.*",),
    )


def _ernie_experts_layers(fields: Fields) -> tuple[int, ...]:
    """Every n-th layer from one to another, both of them included; -1 is the last."""
    layers, step = fields.integer("num_hidden_layers"), fields.integer("moe_layer_interval", 1)
    if step < 1:
        raise CheckpointError(f"{fields.where}: moe_layer_interval is {step}, it should be at least 1")
    first, last = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    return tuple(layer for layer in range(layers) if first <= layer <= last and (layer + 1) % step == 0)
