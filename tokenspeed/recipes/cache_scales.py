"""What a checkpoint says of a cache of 8 bits: scales of keys and values, found where they were largest.

The engine caches keys and values as they are, under no scale. A scale of at most 1 says that all of them lie within
what 8 bits hold (±448), so nothing is lost without it; one above 1 says that the largest do not.
"""

import math
import struct
from pathlib import Path

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.safetensors_file import SafetensorsTensor, read_checkpoint_headers

LARGEST = 448
"""The largest number of float8_e4m3."""

_NAMES = ("k_scale", "v_scale")
_MOST_BYTES = 1 << 16  # a scale for each head or channel at most


def refuse_scales_above_one(folder: Path) -> None:
    """Raises CheckpointError, naming file and tensor, where keys or values reach beyond what 8 bits hold."""
    for path, tensors in read_checkpoint_headers(folder):
        for name, tensor in tensors.items():
            if name.rpartition(".")[2] not in _NAMES:
                continue
            scale = max(_numbers(path, name, tensor), key=lambda value: math.inf if math.isnan(value) else value)
            if not scale <= 1.0:
                raise CheckpointError(
                    f"{path}: {name} is {scale:g}: what it scales reaches {LARGEST * scale:g}, and kv.dtype "
                    f"float8_e4m3 holds numbers up to {LARGEST}; set kv.dtype to auto"
                )


def _numbers(path: Path, name: str, tensor: SafetensorsTensor) -> list[float]:
    count = math.prod(tensor.shape)
    if tensor.dtype not in ("F32", "F16", "BF16") or not 0 < tensor.nbytes <= _MOST_BYTES:
        raise CheckpointError(
            f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}; a scale of a cache in 8 bits is F32, F16 or BF16: "
            "set kv.dtype to auto"
        )
    with path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[place : place + 2] for place in range(0, len(data), 2))
    return list(struct.unpack(f"<{count}{'e' if tensor.dtype == 'F16' else 'f'}", data))
