"""Decoders with latent attention: DeepSeek-V3 and what is built like it."""

from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder
from tokenspeed.recipes.model_config.types import ExpertsConfig, LatentConfig, ModelConfig


def read_latent(fields: Fields) -> LatentConfig:
    """The ranks and widths under the names that DeepSeek's configurations have for them."""
    return LatentConfig(
        query_rank=fields.integer("q_lora_rank", 0),
        latent=fields.integer("kv_lora_rank"),
        rotary=fields.integer("qk_rope_head_dim"),
        plain=fields.integer("qk_nope_head_dim"),
        value=fields.integer("v_head_dim"),
    )


def read_experts(fields: Fields) -> ExpertsConfig | None:
    """The mixture as DeepSeek-V3 has it; None where every layer is dense."""
    fields.refuse_unless("scoring_func", ("sigmoid",))
    fields.refuse_unless("topk_method", ("noaux_tc",))
    count, layers = fields.integer("n_routed_experts", 0), range(fields.integer("num_hidden_layers"))
    first, step = fields.integer("first_k_dense_replace", 0), fields.integer("moe_layer_freq", 1)
    chosen = tuple(layer for layer in layers if layer >= first and layer % step == 0)
    if not count or not chosen:
        return None
    intermediate = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        layers=chosen,
        count=count,
        active=fields.integer("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=fields.integer("n_shared_experts", 0) * intermediate,
        scoring="sigmoid",
        corrected=True,
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def deepseek_v3(fields: Fields, generation: Generation, architecture: str = "deepseek_v3") -> ModelConfig:
    """DeepSeek-V3, R1 and V3.1. Layers beyond the last, which draft tokens, are left out."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("rope_interleave", (True,))
    latent, layers = read_latent(fields), fields.integer("num_hidden_layers")
    drafts = range(layers, layers + fields.integer("num_nextn_predict_layers", 0))
    return decoder(
        fields,
        generation,
        architecture,
        head_dim=latent.plain + latent.rotary,
        latent=latent,
        experts=read_experts(fields),
        ignored_weights=tuple(rf"model\.layers\.{layer}\..*" for layer in drafts),
    )


def kimi_k25(fields: Fields, generation: Generation) -> ModelConfig:
    """The text model of Kimi K2.5, which is a DeepSeek-V3; its vision encoder is left out."""
    text = fields.part("text_config")
    found = deepseek_v3(text, generation, "kimi_k25")
    return found.without(r"(model\.)?vision_tower\..*", r"(model\.)?mm_projector\..*", r"model\.(visual|vision)\w*\..*")
