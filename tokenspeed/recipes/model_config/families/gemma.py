"""Gemma 2 and 3: windows in some layers, norms before and behind both blocks, scaled embeddings, gates by gelu."""

from collections.abc import Mapping
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, check_layer_types, decoder
from tokenspeed.recipes.model_config.rope import rope_of
from tokenspeed.recipes.model_config.types import ModelConfig, RopeConfig

_DEFAULTS: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""What configurations leave out that say only how they differ from the first model of the family."""


def _gemma(fields: Fields, generation: Generation, architecture: str, *, pattern: int, **own: Any) -> ModelConfig:
    """Every ``pattern``-th layer sees everything where layer_types does not say which do."""
    fields.refuse_unless("hidden_activation", ("gelu_pytorch_tanh",))
    fields.refuse_unless("use_bidirectional_attention", (False,))
    layers = fields.integer("num_hidden_layers")
    types = fields.values.get("layer_types") or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)
    ]
    check_layer_types(fields, types, ("full_attention", "sliding_attention"))
    sliding = tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
    return decoder(
        fields,
        generation,
        architecture,
        norm_offset=1.0,
        sliding_window=fields.integer("sliding_window") if sliding else 0,
        sliding_layers=sliding,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        activation="gelu_tanh",
        **own,
    )


def _with_defaults(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    given = {key: value for key, value in fields.values.items() if value is not None}
    return Fields(fields.where, {**_DEFAULTS, **defaults, **given})


def gemma2(fields: Fields, generation: Generation) -> ModelConfig:
    """Gemma 2: scores and logits have a soft cap, unless the configuration says null."""
    caps = {
        ours: fields.number(theirs, 0.0) if theirs in fields.values else default
        for ours, theirs, default in (
            ("soft_cap", "attn_logit_softcapping", 50.0),
            ("logit_soft_cap", "final_logit_softcapping", 30.0),
        )
    }
    fields = _with_defaults(fields, {"vocab_size": 256000, "max_position_embeddings": 8192})
    return _gemma(fields, generation, "gemma2", pattern=2, **caps)


def gemma3(fields: Fields, generation: Generation) -> ModelConfig:
    """The text model of Gemma 3: norms over the heads of q and k, and two rotary embeddings."""
    if fields.values.get("attn_logit_softcapping") is not None:
        raise CheckpointError(f"{fields.where}: attn_logit_softcapping is set; scores of Gemma 3 have no cap")
    fields = _with_defaults(fields, {"vocab_size": 262208, "max_position_embeddings": 131072})
    return _gemma(
        fields,
        generation,
        "gemma3",
        pattern=fields.integer("sliding_window_pattern", 6),
        qk_norm=True,
        rope=_rope(fields, "full_attention", "rope_theta", 1000000.0),
        sliding_rope=_rope(fields, "sliding_attention", "rope_local_base_freq", 10000.0),
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
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
    return rope_of(fields, {**(scaling or {}), "rope_theta": fields.number(theta_key, default)})
