"""How many bytes an engine's weights take: read from the headers of a checkpoint, no tensor is touched."""

import math
from pathlib import Path

from tokenspeed.recipes.gguf_file import GgufError, GgufHeader, read_gguf_header
from tokenspeed.recipes.model_config import CheckpointError, ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.stored_weights import stored_weights

_HEAD = "lm_head.weight"
_DENSE = ("F32", "F16", "BF16")


def read_checkpoint(source: ModelSource, *, converted: bool = True) -> tuple[ModelConfig, int]:
    """Config and bytes of a checkpoint on this machine; raises CheckpointError.

    ``converted``: quantised matrices of safetensors files count as what the CPU makes of them, else as they are stored.
    """
    header = _gguf_header(source.path) if source.kind == "gguf" else None
    config = read_model_config(source)
    size = _checkpoint_bytes(source, config, converted)
    del header  # held until here: walking it twice would take twice as long
    return config, size


def _gguf_header(path: str) -> GgufHeader:
    try:
        return read_gguf_header(path)
    except GgufError as error:
        raise CheckpointError(str(error)) from error


def _gguf_bytes(header: GgufHeader, config: ModelConfig) -> int:
    """All that lies in the file, less the layers that draft tokens; up-projections in two parts become bfloat16 where
    they are blocks."""
    kept = range(config.num_layers)
    total = 0
    for name, tensor in header.tensors.items():
        place = name.split(".")
        if place[0] == "blk" and int(place[1]) not in kept:
            continue
        is_turned = name.endswith((".attn_k_b.weight", ".attn_v_b.weight")) and tensor.type_name not in _DENSE
        total += 2 * math.prod(tensor.shape) if is_turned else tensor.nbytes
    return total


def _checkpoint_bytes(source: ModelSource, config: ModelConfig, converted: bool) -> int:
    """What is not used does not count: a stored copy of a tied embedding as output head, and what is left out knowingly
    (a vision encoder, layers that draft tokens)."""
    if source.kind == "gguf":
        return _gguf_bytes(_gguf_header(source.path), config)
    stored = stored_weights(Path(source.path), config.quantization, config.ignored_weights)
    weights = [weight for name, weight in stored.items() if not (config.tie_word_embeddings and name == _HEAD)]
    if converted:
        return sum(weight.resident_bytes for weight in weights)
    return sum(part.tensor.nbytes for weight in weights for part in weight.parts)
