"""Reads what a checkpoint says of itself (config.json, GGUF metadata, a recipe's random dimensions). No torch here.

The execution plane builds the model from it, the frontend takes the special tokens and the context length, the memory
plan its sizes: one reading for all.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError as CheckpointError
from tokenspeed.recipes.gguf_file import GgufError, read_gguf_header
from tokenspeed.recipes.model_config.families import FAMILIES, Reader
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.gguf import from_gguf
from tokenspeed.recipes.model_config.types import CompressionConfig as CompressionConfig
from tokenspeed.recipes.model_config.types import ExpertsConfig as ExpertsConfig
from tokenspeed.recipes.model_config.types import IndexConfig as IndexConfig
from tokenspeed.recipes.model_config.types import LatentConfig as LatentConfig
from tokenspeed.recipes.model_config.types import LinearAttentionConfig as LinearAttentionConfig
from tokenspeed.recipes.model_config.types import ModelConfig as ModelConfig
from tokenspeed.recipes.model_config.types import RopeConfig as RopeConfig
from tokenspeed.recipes.model_config.types import StreamsConfig as StreamsConfig
from tokenspeed.recipes.quantization import with_quantization_beside
from tokenspeed.recipes.resolved import ModelSource

ARCHITECTURES = {name: architecture for name, (architecture, _) in FAMILIES.items()}
"""The class names of config.json, to our names; GGUF files use our names already."""


def read_model_config(source: ModelSource) -> ModelConfig:
    """Returns the dimensions of ``source``; raises CheckpointError where the files are missing, damaged or unknown."""
    if source.kind == "gguf":
        try:
            return _checked(from_gguf(read_gguf_header(source.path)), source.path)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
    if source.kind == "random":
        values = _parsed("random_config", source.random_config)
        if values.get("quantization_config"):
            raise CheckpointError("random_config: random weights are not quantised; leave quantization_config out")
        return _from_huggingface(Fields("random_config", values), {})
    folder = Path(source.path)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has no config.json; give the folder of a Hugging Face checkpoint (config.json, *.safetensors, "
            "tokenizer.json) or the path of a .gguf file"
        )
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    values = with_quantization_beside(folder, _read_json(path))
    return _from_huggingface(Fields(str(path), values), generation)


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


def _from_huggingface(fields: Fields, generation: dict[str, Any]) -> ModelConfig:
    return _checked(_reader(fields)(fields, generation), fields.where)


def named_architecture(values: Mapping[str, Any]) -> str:
    """Our name of the architecture that a config.json names by class or model type; "" where it is not supported."""
    names = values.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = str(values.get("model_type"))
    return model_type if model_type in ARCHITECTURES.values() else ""


def _reader(fields: Fields) -> Reader:
    """By the class name, or by the model type where no class is named."""
    names = fields.values.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name][1]
    model_type = str(fields.values.get("model_type"))
    if not names:
        for architecture, reader in FAMILIES.values():
            if architecture in (model_type, model_type.removesuffix("_text")):
                return reader
    asked = ", ".join(map(str, names)) or repr(model_type)
    near = get_close_matches(
        str(names[0] if names else model_type), {**FAMILIES, **dict.fromkeys(ARCHITECTURES.values())}, 3, 0.6
    )
    nearest = f"nearest are {', '.join(near)}; " if near else ""
    raise CheckpointError(
        f"{fields.where}: architecture {asked} is not supported; {nearest}supported are {', '.join(FAMILIES)}"
    )


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
