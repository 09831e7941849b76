"""Decoders with grouped-query attention and a mixture of experts."""

from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder, read_windows
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
