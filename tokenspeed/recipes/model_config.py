"""Reads what a checkpoint says of itself (config.json, GGUF metadata, a recipe's random dimensions). No torch here.

The execution plane builds the model from it, the frontend takes the special tokens and the context length, the memory
plan its sizes: one reading for all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError as CheckpointError
from tokenspeed.recipes.gguf_file import GgufError, GgufHeader, read_gguf_header
from tokenspeed.recipes.gguf_formats import FILE_TYPES
from tokenspeed.recipes.quantization import Quantization, read_quantization
from tokenspeed.recipes.resolved import ModelSource

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""The class names of config.json, to our names; GGUF files use our names already."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. ``kind`` "default", "linear", "llama3" ...; ``parameters`` are that kind's own."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder's dimensions.

    Attributes:
        architecture: "llama" or "qwen3" so far; the name of the file under tokenspeed/models/.
        rope: see RopeConfig.
        context_length: the longest sequence the model was made for.
        eos_token_ids: all ids that end a generation (generation_config.json counts too).
        dtype: what the checkpoint stores: "float32", "bfloat16", "float16" or a GGUF file type; of a quantised one,
            what the rest of it is stored in.
        quantization: how the quantised matrices of safetensors files are stored; None where none is.
        q_and_k_permuted: GGUF stores the q and k rows of llama models permuted for interleaved rotary.
        sliding_window: positions that a token sees in the layers ``sliding_layers``, its own the last of them; else 0.
        sliding_layers: indices of the layers with that window; all others see the whole sequence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None
    q_and_k_permuted: bool = False
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()


def read_model_config(source: ModelSource) -> ModelConfig:
    """Returns the dimensions of ``source``; raises CheckpointError where the files are missing, damaged or unknown."""
    if source.kind == "gguf":
        try:
            return _checked(_from_gguf(read_gguf_header(source.path)), source.path)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
    if source.kind == "random":
        values = _parsed("random_config", source.random_config)
        if values.get("quantization_config"):
            raise CheckpointError("random_config: random weights are not quantised; leave quantization_config out")
        return _checked(_from_hf(_Fields("random_config", values), {}), "random_config")
    folder = Path(source.path)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has no config.json; give the folder of a Hugging Face checkpoint (config.json, *.safetensors, "
            "tokenizer.json) or the path of a .gguf file"
        )
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return _checked(_from_hf(_Fields(str(path), _read_json(path)), generation), str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return _parsed(str(path), text)


def _parsed(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: line {error.lineno}, column {error.colno}: not JSON ({error.msg})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: a JSON object was expected, it holds a {type(value).__name__}")
    return value


class _Fields:
    """Typed access to a mapping, with errors that name the file and the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} should be an integer, it is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} should be a number, it is {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} should be true or false, it is {value!r}")
        return value

    def refuse_unless(self, key: str, accepted: tuple[object, ...]) -> None:
        """Raises where ``key`` is present with a value this engine would have to ignore."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise CheckpointError(f"{self.where}: {key} is {value!r}, supported is {' or '.join(map(repr, accepted))}")


def _from_hf(fields: _Fields, generation: Mapping[str, Any]) -> ModelConfig:
    architecture = _hf_architecture(fields)
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("pretraining_tp", (1,))
    window, sliding_layers = _hf_windows(fields, architecture)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", 128 if architecture == "qwen3" else hidden // max(heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_hf_rope(fields),
        context_length=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=architecture == "qwen3",
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        bos_token_id=_first_id(fields.values.get("bos_token_id")),
        eos_token_ids=_ids(fields.values.get("eos_token_id"), generation.get("eos_token_id")),
        dtype=str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"),
        quantization=read_quantization(fields.where, fields.values),
        sliding_window=window,
        sliding_layers=sliding_layers,
    )


def _hf_architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = fields.values.get("model_type")
    if not names and model_type in ARCHITECTURES.values():
        return str(model_type)
    raise CheckpointError(
        f"{fields.where}: architecture {', '.join(map(str, names)) or model_type!r} is not supported; "
        f"supported are {', '.join(ARCHITECTURES)}"
    )


def _hf_windows(fields: _Fields, architecture: str) -> tuple[int, tuple[int, ...]]:
    """The window and the layers that have it: layer_types where it is given, else the layers from max_window_layers on.

    The defaults are those of transformers' Qwen3Config. Llama has no windows: what asks for them is refused.
    """
    if architecture != "qwen3":
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
        unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
        if unknown or len(types) != layers:
            raise CheckpointError(
                f"{fields.where}: layer_types holds {len(types)} entries{f' with {unknown}' if unknown else ''}; "
                f"supported are full_attention and sliding_attention, one for each of the {layers} layers"
            )
        if sliding and not window:
            raise CheckpointError(
                f"{fields.where}: layer_types has sliding_attention, but no window is in force; set use_sliding_window "
                "and sliding_window (models of the qwen3 architecture), or make every layer full_attention"
            )
    return (window, tuple(sliding)) if sliding else (0, ())


def _hf_rope(fields: _Fields) -> RopeConfig:
    """Reads rope_parameters (transformers 5) or rope_theta with rope_scaling (before)."""
    values = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{fields.where}: rope_parameters should be an object, it is {values!r}")
    rope = _Fields(f"{fields.where}: rope_parameters", values)
    rope.refuse_unless("partial_rotary_factor", (1, 1.0))
    fields.refuse_unless("partial_rotary_factor", (1, 1.0))
    return _rope(
        rope,
        kind=str(values.get("rope_type") or values.get("type") or "default"),
        theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
    )


_ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(fields: _Fields, *, kind: str, theta: float) -> RopeConfig:
    if kind not in _ROPE_PARAMETERS:
        raise CheckpointError(
            f"{fields.where}: rotary scaling {kind!r} is not supported; supported are {', '.join(_ROPE_PARAMETERS)}"
        )
    parameters = {name: fields.number(name) for name in _ROPE_PARAMETERS[kind]}
    for name, value in parameters.items():
        if value <= 0:
            raise CheckpointError(f"{fields.where}: {name} should be above 0, it is {value}")
    return RopeConfig(theta=theta, kind=kind, parameters=parameters)


def _ids(*values: object) -> tuple[int, ...]:
    """Flattens ids and lists of ids to unique ids in order; None is nothing."""
    found: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                found[item] = None
    return tuple(found)


def _first_id(value: object) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def _from_gguf(header: GgufHeader) -> ModelConfig:
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES.values():
        raise CheckpointError(
            f"{header.path}: general.architecture is {architecture!r}; "
            f"supported are {', '.join(ARCHITECTURES.values())}"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    fields = _Fields(f"{header.path}: {architecture}", own)
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.refuse_unless(key, (head_dim,))
    fields.refuse_unless("expert_count", (0,))
    special = _Fields(f"{header.path}: tokenizer", header.metadata)
    ids = [special.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=str(architecture),
        vocab_size=_gguf_vocab_size(header),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields),
        context_length=fields.integer("context_length"),
        tie_word_embeddings="output.weight" not in header.tensors,
        qk_norm=architecture == "qwen3",
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        bos_token_id=_first_id(special.values.get("tokenizer.ggml.bos_token_id")),
        eos_token_ids=_ids(*ids),
        dtype=_gguf_file_type(header),
        q_and_k_permuted=architecture == "llama",
    )


def _gguf_vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{header.path}: has no token_embd.weight matrix; it holds no whole model (a part of a split file, or an "
            "adapter): give the whole model in one file"
        )
    return embedding.shape[0]


def _gguf_rope(fields: _Fields) -> RopeConfig:
    """Frequency factors of llama 3.1 and later lie in the tensor rope_freqs.weight, which the loader applies."""
    kind = str(fields.values.get("rope.scaling.type") or "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    theta = fields.number("rope.freq_base", 10000.0)
    scaling = _Fields(f"{fields.where}.rope.scaling", {"factor": factor})
    return _rope(scaling, kind="default" if kind == "none" else kind, theta=theta)


def _gguf_file_type(header: GgufHeader) -> str:
    value = header.metadata.get("general.file_type")
    return FILE_TYPES.get(value, "gguf") if isinstance(value, int) else "gguf"


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    """Refuses dimensions that cannot be a model, before anything of that size is allocated."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                 "head_dim", "context_length"):  # fmt: skip
        if getattr(config, name) < 1:
            raise CheckpointError(f"{where}: {name} is {getattr(config, name)}, it should be at least 1")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} attention heads are not a multiple of {config.num_kv_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim {config.head_dim} is odd; rotary embedding needs an even one")
    beyond = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if beyond:
        raise CheckpointError(
            f"{where}: end-of-sequence ids {beyond} lie outside the vocabulary of {config.vocab_size} tokens"
        )
    return config
