"""Dimensions out of the metadata of a GGUF file."""

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.gguf_file import GgufHeader
from tokenspeed.recipes.gguf_formats import FILE_TYPES
from tokenspeed.recipes.model_config.fields import Fields, first_id, ids
from tokenspeed.recipes.model_config.rope import make_rope
from tokenspeed.recipes.model_config.types import ModelConfig, RopeConfig

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those that files of this kind may hold; their names there are ours."""


def from_gguf(header: GgufHeader) -> ModelConfig:
    """The model that the file holds; CheckpointError for an architecture that is not among the supported."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: general.architecture is {architecture!r}; supported are {', '.join(GGUF_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    fields = Fields(f"{header.path}: {architecture}", own)
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.refuse_unless(key, (head_dim,))
    fields.refuse_unless("expert_count", (0,))
    special = header.metadata
    ends = [special.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=str(architecture),
        vocab_size=_vocab_size(header),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields),
        context_length=fields.integer("context_length"),
        tie_word_embeddings="output.weight" not in header.tensors,
        qk_norm=architecture == "qwen3",
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        bos_token_id=first_id(special.get("tokenizer.ggml.bos_token_id")),
        eos_token_ids=ids(*ends),
        dtype=_file_type(header),
        q_and_k_permuted=architecture == "llama",
    )


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{header.path}: has no token_embd.weight matrix; it holds no whole model (a part of a split file, or an "
            "adapter): give the whole model in one file"
        )
    return embedding.shape[0]


def _rope(fields: Fields) -> RopeConfig:
    """Frequency factors of llama 3.1 and later lie in the tensor rope_freqs.weight, which the loader applies."""
    kind = str(fields.values.get("rope.scaling.type") or "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    theta = fields.number("rope.freq_base", 10000.0)
    scaling = Fields(
        f"{fields.where}.rope.scaling",
        {
            "factor": factor,
            "original_max_position_embeddings": fields.values.get("rope.scaling.original_context_length"),
        },
    )
    return make_rope(scaling, kind="default" if kind == "none" else kind, theta=theta)


def _file_type(header: GgufHeader) -> str:
    value = header.metadata.get("general.file_type")
    return FILE_TYPES.get(value, "gguf") if isinstance(value, int) else "gguf"
