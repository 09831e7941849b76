"""Gemma 3: windows in most layers, norms before and behind both blocks, scaled embeddings, gates by gelu."""

from collections.abc import Mapping

from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, check_layer_types, decoder
from tokenspeed.recipes.model_config.rope import rope_of
from tokenspeed.recipes.model_config.types import ModelConfig, RopeConfig

_DEFAULTS: dict[str, object] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""What a configuration leaves out that says only how it differs from the first model of the family."""


def gemma3(fields: Fields, generation: Generation) -> ModelConfig:
    """The text model of Gemma 3."""
    given = {key: value for key, value in fields.values.items() if value is not None}
    fields = Fields(fields.where, {**_DEFAULTS, **given})
    fields.refuse_unless("hidden_activation", ("gelu_pytorch_tanh",))
    fields.refuse_unless("use_bidirectional_attention", (False,))
    layers = fields.integer("num_hidden_layers")
    pattern = fields.integer("sliding_window_pattern", 6)
    types = fields.values.get("layer_types") or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)
    ]
    check_layer_types(fields, types, ("full_attention", "sliding_attention"))
    sliding = tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
    return decoder(
        fields,
        generation,
        "gemma3",
        qk_norm=True,
        norm_offset=1.0,
        rope=_rope(fields, "full_attention", "rope_theta", 1000000.0),
        sliding_rope=_rope(fields, "sliding_attention", "rope_local_base_freq", 10000.0),
        sliding_window=fields.integer("sliding_window") if sliding else 0,
        sliding_layers=sliding,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=fields.number("attn_logit_softcapping", 0.0),
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        activation="gelu_tanh",
    )


def gemma3_with_vision(fields: Fields, generation: Generation) -> ModelConfig:
    """The text model of the checkpoints that see; their vision encoder is left out."""
    found = gemma3(fields.part("text_config"), generation)
    return found.without(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")


def _rope(fields: Fields, kind: str, theta_key: str, default: float) -> RopeConfig:
    """That of one kind of layer: of rope_parameters, which has one for each (transformers 5), or of the keys before;
    there a scaling is for the layers that see everything."""
    each = fields.values.get("rope_parameters")
    if isinstance(each, Mapping) and "rope_theta" not in each:
        return rope_of(fields, each.get(kind) or {}, theta=default)
    scaling = fields.values.get("rope_scaling") if kind == "full_attention" else None
    values = {**(scaling or {}), "rope_theta": fields.number(theta_key, default)}
    return rope_of(fields, values)
