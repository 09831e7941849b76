"""gpt-oss: windows in every other layer, sinks in all of them, experts with biases and a clamped activation."""

from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, check_layer_types, decoder
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ExpertsConfig, ModelConfig


def gpt_oss(fields: Fields, generation: Generation) -> ModelConfig:
    """gpt-oss-20b and -120b; where layer_types is not given, the layers take turns and the first has a window."""
    fields.refuse_unless("hidden_act", ("silu",))
    layers, window = range(fields.integer("num_hidden_layers")), fields.integer("sliding_window", 128)
    types = fields.values.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    check_layer_types(fields, types, ("full_attention", "sliding_attention"))
    sliding = tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
    experts = ExpertsConfig(
        layers=tuple(layers),
        count=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        active=fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4)),
        intermediate=fields.integer("intermediate_size"),
        biases=True,
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )
    bias = fields.flag("attention_bias", True)
    return decoder(
        fields,
        generation,
        "gpt_oss",
        head_dim=fields.integer("head_dim", 64),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope=read_rope(fields, theta=150000.0),
        attention_bias=bias,
        output_bias=bias,
        sinks=True,
        sliding_window=window if sliding else 0,
        sliding_layers=sliding,
        experts=experts,
    )
