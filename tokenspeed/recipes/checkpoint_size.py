"""How many bytes of a checkpoint's weights an engine maps: read from the headers, no tensor is touched."""

from pathlib import Path

from tokenspeed.recipes.gguf_file import GgufError, GgufHeader, read_gguf_header
from tokenspeed.recipes.model_config import CheckpointError, ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.safetensors_file import checkpoint_files, read_safetensors_header

_HEAD = "lm_head.weight"


def read_checkpoint(source: ModelSource) -> tuple[ModelConfig, int]:
    """Config and bytes of a checkpoint on this machine; raises CheckpointError."""
    header = _gguf_header(source.path) if source.kind == "gguf" else None
    config = read_model_config(source)
    size = checkpoint_bytes(source, tied=config.tie_word_embeddings)
    del header  # held until here: walking it twice would take twice as long
    return config, size


def _gguf_header(path: str) -> GgufHeader:
    try:
        return read_gguf_header(path)
    except GgufError as error:
        raise CheckpointError(str(error)) from error


def checkpoint_bytes(source: ModelSource, *, tied: bool) -> int:
    """Bytes of the tensors in a GGUF file or in a folder's safetensors files.

    ``tied``: a stored copy of the embedding as output head is not used, so it does not count. Raises CheckpointError
    for a damaged or missing file.
    """
    if source.kind == "gguf":
        return sum(tensor.nbytes for tensor in _gguf_header(source.path).tensors.values())
    tensors = [item for path in checkpoint_files(Path(source.path)) for item in read_safetensors_header(path).items()]
    return sum(tensor.nbytes for name, tensor in tensors if not (tied and name == _HEAD))
