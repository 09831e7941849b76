"""Decoders whose layers are all alike: attention and a dense MLP."""

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder, read_windows
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
