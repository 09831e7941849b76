"""Decoders whose layers are all alike: attention and a dense MLP."""

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder, read_windows
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ModelConfig


def _refuse_others(fields: Fields) -> None:
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("partial_rotary_factor", (1, 1.0))
    fields.refuse_unless("pretraining_tp", (1,))


def llama(fields: Fields, generation: Generation) -> ModelConfig:
    """Llama and what is built like it."""
    _refuse_others(fields)
    read_windows(fields, allowed=False)
    return decoder(fields, generation, "llama", mlp_bias=fields.flag("mlp_bias", False))


def mistral(fields: Fields, generation: Generation) -> ModelConfig:
    """Mistral: llama, whose layers may all have a window."""
    _refuse_others(fields)
    window = fields.integer("sliding_window", 0)
    if window < 0:
        raise CheckpointError(f"{fields.where}: sliding_window is {window}, it should be at least 1, or null")
    layers = tuple(range(fields.integer("num_hidden_layers"))) if window else ()
    return decoder(fields, generation, "mistral", attention_bias=False, sliding_window=window, sliding_layers=layers)


def qwen2(fields: Fields, generation: Generation) -> ModelConfig:
    """Qwen2 and 2.5: biases at q, k and v alone."""
    _refuse_others(fields)
    window, sliding = read_windows(fields, allowed=True)
    return decoder(fields, generation, "qwen2", attention_bias=True, sliding_window=window, sliding_layers=sliding)


def qwen3(fields: Fields, generation: Generation) -> ModelConfig:
    """Qwen3: norms over the heads of q and k."""
    _refuse_others(fields)
    window, sliding = read_windows(fields, allowed=True)
    return decoder(
        fields,
        generation,
        "qwen3",
        head_dim=fields.integer("head_dim", 128),
        qk_norm=True,
        sliding_window=window,
        sliding_layers=sliding,
    )


def smollm3(fields: Fields, generation: Generation) -> ModelConfig:
    """SmolLM3: llama, of which some layers rotate nothing; where windows are asked for, these have them.

    pretraining_tp, which published checkpoints have, says how the training was shared out and changes no number.
    """
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("partial_rotary_factor", (1, 1.0))
    unturned = _unturned_layers(fields)
    kinds = [
        "sliding_attention" if _has_windows(fields) and layer in unturned else "full_attention"
        for layer in range(fields.integer("num_hidden_layers"))
    ]
    given = {key: value for key, value in fields.values.items() if value is not None}
    window, sliding = read_windows(
        Fields(fields.where, {"layer_types": kinds, "sliding_window": None, **given}), allowed=True
    )
    return decoder(
        fields,
        generation,
        "smollm3",
        mlp_bias=fields.flag("mlp_bias", False),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        rope=read_rope(fields, theta=2000000.0),
        sliding_window=window,
        sliding_layers=sliding,
        unturned_layers=unturned,
    )


def _has_windows(fields: Fields) -> bool:
    return fields.flag("use_sliding_window", False) and fields.values.get("sliding_window") is not None


def _unturned_layers(fields: Fields) -> tuple[int, ...]:
    """Those with a 0 in no_rope_layers; every no_rope_layer_interval-th where that is not given."""
    layers, turned = fields.integer("num_hidden_layers"), fields.values.get("no_rope_layers")
    if turned is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        if interval < 1:
            raise CheckpointError(f"{fields.where}: no_rope_layer_interval is {interval}, it should be at least 1")
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(turned, list) or len(turned) < layers or any(value not in (0, 1) for value in turned):
        raise CheckpointError(
            f"{fields.where}: no_rope_layers is {turned!r}; it has a 1 for each of the {layers} layers that rotates "
            "queries and keys, a 0 for each that does not"
        )
    return tuple(layer for layer in range(layers) if not turned[layer])
