"""How many bytes of a checkpoint's weights an engine maps: read from the headers, no tensor is touched."""

import json
import struct
from pathlib import Path

from tokenspeed.recipes.gguf_file import GgufError, GgufHeader, read_gguf_header
from tokenspeed.recipes.model_config import CheckpointError, ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource

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
    for a damaged header.
    """
    if source.kind == "gguf":
        return sum(tensor.nbytes for tensor in _gguf_header(source.path).tensors.values())
    total = 0
    for path in sorted(Path(source.path).glob("*.safetensors")):
        for name, size in safetensors_sizes(path).items():
            total += 0 if tied and name == _HEAD else size
    return total


def safetensors_sizes(path: Path) -> dict[str, int]:
    """Tensor names to bytes, as the header of one file says; raises CheckpointError."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > path.stat().st_size:
                raise ValueError(f"a header of {length} bytes in a file of {path.stat().st_size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: fields["data_offsets"][1] - fields["data_offsets"][0] for name, fields in header.items()}
    except (OSError, struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header ({error}); download the file again") from error
