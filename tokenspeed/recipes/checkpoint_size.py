"""How many bytes an engine's weights take: read from the headers of a checkpoint, no tensor is touched."""

import math
from pathlib import Path

from tokenspeed.recipes.gguf_file import GgufError, GgufHeader, read_gguf_header
from tokenspeed.recipes.model_config import CheckpointError, ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.stored_weights import stored_weights

_EMBEDDING = "token_embd.weight"
_HEAD = "lm_head.weight"
_DENSE = ("F32", "F16", "BF16")

PLANES_GROWTH = {"Q2_K": 164 / 84, "Q3_K": 146 / 110, "Q4_K": 148 / 144, "Q5_K": 180 / 176}
"""What GGUF blocks take more where kernels of a GPU hold them as planes: elements of two and three bits as four, scales
of six bits as eight. All others take as much or less."""


def read_checkpoint(source: ModelSource, *, planes: bool = False) -> tuple[ModelConfig, int]:
    """Config and bytes of a checkpoint on this machine, quantised matrices of safetensors files counted as what they
    become when they are loaded; raises CheckpointError.

    ``planes``: kernels hold them as those of a GPU do.
    """
    header = _gguf_header(source.path) if source.kind == "gguf" else None
    config = read_model_config(source)
    size = _checkpoint_bytes(source, config, planes)
    del header  # held until here: walking it twice would take twice as long
    return config, size


def _gguf_header(path: str) -> GgufHeader:
    try:
        return read_gguf_header(path)
    except GgufError as error:
        raise CheckpointError(str(error)) from error


def _gguf_bytes(header: GgufHeader, config: ModelConfig, planes: bool) -> int:
    """All that lies in the file, less the layers that draft tokens; up-projections in two parts become bfloat16 where
    they are blocks. As ``planes`` an embedding stays as it is, and if it is the head too, it is there in both forms."""
    kept = range(config.num_layers)
    total = 0.0
    for name, tensor in header.tensors.items():
        place = name.split(".")
        if place[0] == "blk" and int(place[1]) not in kept:
            continue
        is_turned = name.endswith((".attn_k_b.weight", ".attn_v_b.weight")) and tensor.type_name not in _DENSE
        size = 2 * math.prod(tensor.shape) if is_turned else tensor.nbytes
        held = size * PLANES_GROWTH.get(tensor.type_name, 1.0) if planes and not is_turned else size
        if planes and name == _EMBEDDING and tensor.type_name not in _DENSE:
            held = size + held if config.tie_word_embeddings else size
        total += held
    return int(total)


def _checkpoint_bytes(source: ModelSource, config: ModelConfig, planes: bool) -> int:
    """What is not used does not count: a stored copy of a tied embedding as output head, and what is left out knowingly
    (a vision encoder, layers that draft tokens)."""
    if source.kind == "gguf":
        return _gguf_bytes(_gguf_header(source.path), config, planes)
    stored = stored_weights(Path(source.path), config.quantization, config.ignored_weights)
    weights = [weight for name, weight in stored.items() if not (config.tie_word_embeddings and name == _HEAD)]
    return sum(weight.resident_bytes for weight in weights)
