"""What every config.json says alike: the fields of a decoder, under the names that transformers gives them."""

from collections.abc import Mapping
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields, first_id, ids
from tokenspeed.recipes.model_config.rope import read_rope
from tokenspeed.recipes.model_config.types import ModelConfig
from tokenspeed.recipes.quantization import read_quantization

Generation = Mapping[str, Any]
"""What generation_config.json says; empty where there is none."""


def decoder(fields: Fields, generation: Generation, architecture: str, **own: Any) -> ModelConfig:
    """The configuration of a decoder; ``own`` are the fields that the architecture reads itself, or has by nature."""
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    bias = fields.flag("attention_bias", False) if "attention_bias" not in own else False
    found: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "context_length": fields.integer("max_position_embeddings"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "qk_norm": False,
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
        "bos_token_id": first_id(fields.values.get("bos_token_id")),
        "eos_token_ids": ids(fields.values.get("eos_token_id"), generation.get("eos_token_id")),
        "dtype": str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"),
        "quantization": read_quantization(fields.where, fields.values),
    }
    if "head_dim" not in own:
        found["head_dim"] = fields.integer("head_dim", hidden // max(heads, 1))
    if "intermediate_size" not in own:
        found["intermediate_size"] = fields.integer("intermediate_size")
    if "rope" not in own:
        found["rope"] = read_rope(fields)
    return ModelConfig(architecture=architecture, **{**found, **own})


def read_windows(fields: Fields, *, allowed: bool) -> tuple[int, tuple[int, ...]]:
    """The window and the layers that have it: layer_types where it is given, else the layers from max_window_layers on.

    The defaults are those of transformers' Qwen3Config. Where none is ``allowed``, what asks for one is refused.
    """
    if not allowed:
        fields.refuse_unless("use_sliding_window", (False,))
    layers, window = fields.integer("num_hidden_layers"), 0
    if fields.flag("use_sliding_window", False) and fields.values.get("sliding_window", 4096) is not None:
        window = fields.integer("sliding_window", 4096)
        if window < 1:
            raise CheckpointError(f"{fields.where}: sliding_window is {window}, it should be at least 1")
    types = fields.values.get("layer_types")
    if types is None:
        sliding = list(range(fields.integer("max_window_layers", 28), layers)) if window else []
    else:
        sliding = [index for index, kind in enumerate(types) if kind == "sliding_attention"]
        check_layer_types(fields, types, ("full_attention", "sliding_attention"))
        if sliding and not window:
            raise CheckpointError(
                f"{fields.where}: layer_types has sliding_attention, but no window is in force; set use_sliding_window "
                "and sliding_window (models of the qwen3 architecture), or make every layer full_attention"
            )
    return (window, tuple(sliding)) if sliding else (0, ())


def check_layer_types(fields: Fields, types: list[object], known: tuple[str, ...]) -> None:
    """Refuses kinds that are not ``known``, and a list that is not of one kind for each layer."""
    layers = fields.integer("num_hidden_layers")
    unknown = sorted({str(kind) for kind in types} - set(known))
    if unknown or len(types) != layers:
        raise CheckpointError(
            f"{fields.where}: layer_types holds {len(types)} entries{f' with {unknown}' if unknown else ''}; "
            f"supported are {' and '.join(known)}, one for each of the {layers} layers"
        )
