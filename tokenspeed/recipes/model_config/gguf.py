"""Dimensions out of the metadata of a GGUF file."""

from collections.abc import Callable
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.gguf_file import GgufHeader
from tokenspeed.recipes.gguf_formats import FILE_TYPES
from tokenspeed.recipes.model_config.fields import Fields, first_id, ids
from tokenspeed.recipes.model_config.gguf_experts import experts_of, latent_of
from tokenspeed.recipes.model_config.rope import make_rope
from tokenspeed.recipes.model_config.types import ModelConfig, RopeConfig

Reader = Callable[[GgufHeader, Fields], ModelConfig]


def from_gguf(header: GgufHeader) -> ModelConfig:
    """The model that the file holds; CheckpointError for an architecture that is not among the supported."""
    architecture = header.metadata.get("general.architecture")
    reader = _READERS.get(architecture) if isinstance(architecture, str) else None
    if reader is None:
        raise CheckpointError(
            f"{header.path}: general.architecture is {architecture!r}; supported are {', '.join(_READERS)}"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    return reader(header, Fields(f"{header.path}: {architecture}", own))


def _decoder(header: GgufHeader, fields: Fields, architecture: str, **own: Any) -> ModelConfig:
    """The configuration of a decoder; ``own`` are the fields that the architecture reads itself, or has by nature."""
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    special, drafts = header.metadata, range(_layers(fields), fields.integer("block_count"))
    ends = [special.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found: dict[str, Any] = {
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length", fields.integer("expert_feed_forward_length", 0)),
        "num_layers": _layers(fields),
        "num_heads": heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": fields.integer("attention.key_length", hidden // max(heads, 1)),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "context_length": fields.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "qk_norm": False,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "output_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "bos_token_id": first_id(special.get("tokenizer.ggml.bos_token_id")),
        "eos_token_ids": ids(*ends),
        "dtype": _file_type(header),
        "ignored_weights": tuple(rf"(model\.layers|blk)\.{layer}\..*" for layer in drafts),
    }
    if "head_dim" not in own:
        fields.refuse_unless("attention.value_length", (found["head_dim"],))
    if "rope" not in own:
        fields.refuse_unless("rope.dimension_count", (found["head_dim"],))
        found["rope"] = _rope(fields)
    return ModelConfig(architecture=architecture, **{**found, **own})


def _layers(fields: Fields) -> int:
    """Layers of the model; those beyond, which draft tokens, are counted in the file and left out."""
    return fields.integer("block_count") - fields.integer("nextn_predict_layers", 0)


def _dense(header: GgufHeader, fields: Fields, architecture: str) -> ModelConfig:
    fields.refuse_unless("expert_count", (0,))
    return _decoder(
        header,
        fields,
        architecture,
        qk_norm=architecture == "qwen3",
        q_and_k_permuted=architecture == "llama",
    )


def _qwen3_moe(header: GgufHeader, fields: Fields) -> ModelConfig:
    """Experts in every layer; the chosen ones' weights are renormalised, of which the file says nothing."""
    return _decoder(
        header, fields, "qwen3_moe", qk_norm=True, experts=experts_of(fields, _layers(fields), renormalise=True)
    )


def _deepseek(header: GgufHeader, fields: Fields) -> ModelConfig:
    """DeepSeek-V2 where experts are chosen by softmax, DeepSeek-V3 (and Kimi K2) where they are by sigmoid."""
    latent = latent_of(fields)
    fields.refuse_unless("rope.dimension_count", (latent.rotary,))
    experts = experts_of(fields, _layers(fields))
    architecture = "deepseek_v3" if experts is None or experts.scoring == "sigmoid" else "deepseek_v2"
    # The file has a tenth of mscale_all_dim, and DeepSeek's checkpoints have it equal to mscale.
    scale = 10.0 * fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    heads = fields.integer("attention.head_count")
    return _decoder(
        header,
        fields,
        architecture,
        num_kv_heads=heads,  # the file says 1 where it has the absorbed form
        head_dim=latent.plain + latent.rotary,
        rope=_rope(fields, mscale=scale, mscale_all_dim=scale),
        latent=latent,
        experts=experts,
    )


def _glm4_moe(header: GgufHeader, fields: Fields) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7; part of each head is rotated."""
    head_dim, layers = fields.integer("attention.key_length"), _layers(fields)
    rotated = fields.integer("rope.dimension_count", head_dim)
    return _decoder(
        header,
        fields,
        "glm4_moe",
        head_dim=head_dim,
        rope=_rope(fields, share=rotated / max(1, head_dim)),
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        experts=experts_of(fields, layers),
    )


def _gpt_oss(header: GgufHeader, fields: Fields) -> ModelConfig:
    """gpt-oss: what the file does not say of its activation and windows is the same in both of its sizes."""
    layers = _layers(fields)
    experts = experts_of(
        fields, layers, renormalise=True, scoring="softmax", biases=True, swiglu_alpha=1.702, swiglu_limit=7.0
    )
    window = fields.integer("attention.sliding_window", 128)
    return _decoder(
        header,
        fields,
        "gpt_oss",
        rope=_rope(fields, truncate=0.0),
        sinks=True,
        sliding_window=window,
        sliding_layers=tuple(range(0, layers, 2)),
        experts=experts,
    )


_READERS: dict[str, Reader] = {
    "llama": lambda header, fields: _dense(header, fields, "llama"),
    "qwen2": lambda header, fields: _dense(header, fields, "qwen2"),
    "qwen3": lambda header, fields: _dense(header, fields, "qwen3"),
    "qwen3moe": _qwen3_moe,
    "deepseek2": _deepseek,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
}
"""What files of this kind may hold, under the names that they have for it."""


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{header.path}: has no token_embd.weight matrix; it holds no whole model (it may be an adapter): give the "
            "model itself"
        )
    return embedding.shape[0]


def _rope(fields: Fields, *, share: float = 1.0, **own: float) -> RopeConfig:
    """Frequency factors of llama 3.1 and later lie in the tensor rope_freqs.weight, which the loader applies. ``own``:
    what the architecture knows of its scaling."""
    fields.refuse_unless("rope.scaling.attn_factor", (1.0,))
    kind = str(fields.values.get("rope.scaling.type") or "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    theta = fields.number("rope.freq_base", 10000.0)
    values: dict[str, Any] = {
        "factor": factor,
        "original_max_position_embeddings": fields.values.get("rope.scaling.original_context_length"),
        "beta_fast": fields.values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": fields.values.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": fields.values.get("rope.scaling.yarn_attn_factor"),
        **own,
    }
    scaling = Fields(f"{fields.where}.rope.scaling", values)
    return make_rope(scaling, kind="default" if kind == "none" else kind, theta=theta, share=share)


def _file_type(header: GgufHeader) -> str:
    value = header.metadata.get("general.file_type")
    return FILE_TYPES.get(value, "gguf") if isinstance(value, int) else "gguf"
