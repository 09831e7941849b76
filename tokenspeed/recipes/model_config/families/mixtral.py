"""Mixtral, and MiniMax-M2, whose checkpoints name a mixture's parts alike."""

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ExpertsConfig, ModelConfig


def mixtral(fields: Fields, generation: Generation) -> ModelConfig:
    """Mixtral 8x7B and 8x22B: Mistral whose MLPs are experts; all layers may have a window."""
    fields.refuse_unless("hidden_act", ("silu",))
    layers, window = tuple(range(fields.integer("num_hidden_layers"))), fields.integer("sliding_window", 0)
    if window < 0:
        raise CheckpointError(f"{fields.where}: sliding_window is {window}, it should be at least 1, or null")
    experts = ExpertsConfig(
        layers=layers,
        count=fields.integer("num_local_experts", 8),
        active=fields.integer("num_experts_per_tok", 2),
        intermediate=fields.integer("intermediate_size"),
    )
    return decoder(
        fields,
        generation,
        "mixtral",
        attention_bias=False,
        rope=read_rope(fields, theta=1000000.0),
        sliding_window=window,
        sliding_layers=layers if window else (),
        experts=experts,
    )


def minimax_m2(fields: Fields, generation: Generation) -> ModelConfig:
    """MiniMax-M2 and M2.1: norms over all of q and of k, experts by sigmoid with a correction."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("scoring_func", ("sigmoid",))
    fields.refuse_unless("qk_norm_type", ("per_layer",))
    fields.refuse_unless("use_qk_norm", (True,))
    fields.refuse_unless("shared_intermediate_size", (0,))
    kinds = fields.values.get("attn_type_list") or []
    if any(kind != 1 for kind in kinds):
        raise CheckpointError(
            f"{fields.where}: attn_type_list is {kinds}, supported is 1 (attention over everything) in every layer"
        )
    head_dim = fields.integer("head_dim", 128)
    experts = ExpertsConfig(
        layers=tuple(range(fields.integer("num_hidden_layers"))),
        count=fields.integer("num_local_experts", 256),
        active=fields.integer("num_experts_per_tok", 8),
        intermediate=fields.integer("intermediate_size"),
        scoring="sigmoid",
        corrected=fields.flag("use_routing_bias", True),
    )
    share = fields.integer("rotary_dim", head_dim) / head_dim
    return decoder(
        fields,
        generation,
        "minimax_m2",
        head_dim=head_dim,
        attention_bias=False,
        rope=read_rope(fields, share=share, theta=5000000.0),
        qk_norm=True,
        whole_norms=True,
        experts=experts,
    )
