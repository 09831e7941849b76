"""Decoders with latent attention: DeepSeek-V3 and what is built like it."""

from dataclasses import replace
from typing import Any

from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig


def read_latent(fields: Fields) -> LatentConfig:
    """The ranks and widths under the names that DeepSeek's configurations have for them."""
    return LatentConfig(
        query_rank=fields.integer("q_lora_rank", 0),
        latent=fields.integer("kv_lora_rank"),
        rotary=fields.integer("qk_rope_head_dim"),
        plain=fields.integer("qk_nope_head_dim"),
        value=fields.integer("v_head_dim"),
    )


def latent_rope(fields: Fields) -> RopeConfig:
    """That of the rotated part of a head, all of which is rotated, whatever share of the head it is."""
    return replace(read_rope(fields), share=1.0)


def read_experts(fields: Fields, *, first_dense: int = 0) -> ExpertsConfig | None:
    """The mixture as DeepSeek-V3 has it; None where every layer is dense. ``first_dense``: what first_k_dense_replace
    is where the checkpoint does not say."""
    fields.refuse_unless("scoring_func", ("sigmoid",))
    fields.refuse_unless("topk_method", ("noaux_tc",))
    return experts_of(fields, first_dense=first_dense, scoring="sigmoid", corrected=True)


def experts_of(fields: Fields, *, first_dense: int = 0, **own: Any) -> ExpertsConfig | None:
    """The mixture under the names that DeepSeek's configurations have; ``own``: what the architecture has by nature."""
    count, layers = fields.integer("n_routed_experts", 0), range(fields.integer("num_hidden_layers"))
    first, step = fields.integer("first_k_dense_replace", first_dense), fields.integer("moe_layer_freq", 1)
    kinds = fields.words("mlp_layer_types", len(layers))
    chosen = tuple(
        layer for layer in layers if (kinds[layer] == "sparse" if kinds else layer >= first and layer % step == 0)
    )
    if not count or not chosen:
        return None
    intermediate = fields.integer("moe_intermediate_size")
    found: dict[str, Any] = {
        "layers": chosen,
        "count": count,
        "active": fields.integer("num_experts_per_tok"),
        "intermediate": intermediate,
        "shared_intermediate": fields.integer("n_shared_experts", 0) * intermediate,
        "groups": fields.integer("n_group", 1),
        "top_groups": fields.integer("topk_group", 1),
        "renormalise": fields.flag("norm_topk_prob", True),
        "scale": fields.number("routed_scaling_factor", 1.0),
    }
    return ExpertsConfig(**{**found, **own})


def deepseek_v3(fields: Fields, generation: Generation, architecture: str = "deepseek_v3") -> ModelConfig:
    """DeepSeek-V3, R1 and V3.1. Layers beyond the last, which draft tokens, are left out."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("rope_interleave", (True,))
    return _latent_decoder(fields, generation, architecture, read_experts(fields))


def _latent_decoder(
    fields: Fields, generation: Generation, architecture: str, experts: ExpertsConfig | None, **own: Any
) -> ModelConfig:
    """A decoder with latent attention; layers beyond the last, which draft tokens, are left out."""
    fields.refuse_unless("attention_bias", (False,))
    fields.refuse_unless("mlp_bias", (False,))
    found = {"latent": read_latent(fields), "rope": latent_rope(fields), **own}
    head_dim = found["latent"].plain + found["latent"].rotary
    return decoder(
        fields,
        generation,
        architecture,
        head_dim=head_dim,
        attention_bias=False,
        experts=experts,
        ignored_weights=drafting_layers(fields),
        **found,
    )


def drafting_layers(fields: Fields) -> tuple[str, ...]:
    """Regular expressions for the weights of layers beyond the last, which draft tokens."""
    layers = fields.integer("num_hidden_layers")
    drafts = range(layers, layers + fields.integer("num_nextn_predict_layers", 0))
    return tuple(rf"model\.layers\.{layer}\..*" for layer in drafts)


def deepseek_v2(fields: Fields, generation: Generation) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite: experts by softmax, with or without groups; their weights are not renormalised."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("scoring_func", ("softmax",))
    fields.refuse_unless("topk_method", ("greedy", "group_limited_greedy"))
    fields.refuse_unless("norm_topk_prob", (False,))
    own: dict[str, Any] = {"scoring": "softmax", "renormalise": False}
    if fields.values.get("topk_method") != "group_limited_greedy":
        own |= {"groups": 1, "top_groups": 1}
    return _latent_decoder(fields, generation, "deepseek_v2", experts_of(fields, **own))


def glm4_moe_lite(fields: Fields, generation: Generation) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek-V3 whose first layer alone is dense."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("rope_interleave", (True,))
    experts = read_experts(fields, first_dense=1)
    if experts is not None:
        experts = replace(experts, scale=fields.number("routed_scaling_factor", 1.8))
    return _latent_decoder(fields, generation, "glm4_moe_lite", experts)


def mistral4(fields: Fields, generation: Generation) -> ModelConfig:
    """Mistral Small 4: experts by softmax, queries that grow with their position."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("rope_interleave", (True,))
    fields.refuse_unless("n_group", (1,))
    latent = read_latent(fields)
    rope = fields.part("rope_parameters")
    growth = rope.number("llama_4_scaling_beta", 0.0)
    if growth:
        latent = replace(latent, growth=growth, growth_length=rope.integer("original_max_position_embeddings"))
    experts = experts_of(fields, scoring="softmax")
    return _latent_decoder(fields, generation, "mistral4", experts, latent=latent)


def kimi_k25(fields: Fields, generation: Generation) -> ModelConfig:
    """The text model of Kimi K2.5, which is a DeepSeek-V3; its vision encoder is left out."""
    text = fields.part("text_config")
    found = deepseek_v3(text, generation, "kimi_k25")
    return found.without(r"(model\.)?vision_tower\..*", r"(model\.)?mm_projector\..*", r"model\.(visual|vision)\w*\..*")
