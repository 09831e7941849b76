"""GLM 4: the dense model and the mixtures with grouped-query attention."""

from typing import Any

from tokenspeed.recipes.model_config.families.latent import drafting_layers, read_experts
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ModelConfig


def _glm(fields: Fields, generation: Generation, architecture: str, *, bias: bool, **own: Any) -> ModelConfig:
    """Half of each head is rotated unless the checkpoint says otherwise; o has no bias."""
    fields.refuse_unless("hidden_act", ("silu",))
    attention_bias = fields.flag("attention_bias", bias)
    return decoder(fields, generation, architecture, attention_bias=attention_bias, output_bias=False, **own)


def glm4(fields: Fields, generation: Generation) -> ModelConfig:
    """GLM-4-0414 and GLM-Z1: norms before and behind both blocks, rotary pairs side by side."""
    rope = read_rope(fields, share=0.5, paired=True)
    return _glm(fields, generation, "glm4", bias=True, rope=rope, joined_gate_up=True)


def glm4_moe(fields: Fields, generation: Generation) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7. Layers beyond the last, which draft tokens, are left out."""
    return _glm(
        fields,
        generation,
        "glm4_moe",
        bias=False,
        rope=read_rope(fields, share=0.5),
        qk_norm=fields.flag("use_qk_norm", False),
        experts=read_experts(fields, first_dense=1),
        ignored_weights=drafting_layers(fields),
    )
