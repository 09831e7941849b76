"""Headers of safetensors files, and which files of a folder are the checkpoint. No torch, and no tensor is read."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.model_config import CheckpointError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class SafetensorsTensor:
    """Where a tensor lies: ``dtype`` as the file names it ("BF16"), ``offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of the checkpoint: those that the index names, else model.safetensors, else all there are.

    Raises CheckpointError where there is none, or one is missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index}: damaged index ({error}); download it again") from error
        paths = [folder / name for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {', '.join(missing)} named by {index.name} is missing; download it again")
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: holds no *.safetensors file; convert the checkpoint to safetensors")
    return paths


def read_safetensors_header(path: Path) -> dict[str, SafetensorsTensor]:
    """Every tensor of one file by name; raises CheckpointError where the header is damaged or says what cannot be."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if 8 + length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _tensor(path, name, fields, 8 + length, size) for name, fields in header.items()}
    except CheckpointError:
        raise
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header ({error}); download the file again") from error


def _tensor(path: Path, name: str, fields: dict[str, object], start: int, size: int) -> SafetensorsTensor:
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError(f"{name}: shape and data_offsets should be lists")
    begin, end = offsets
    if not 0 <= begin <= end or start + end > size:
        raise CheckpointError(
            f"{path}: {name} of shape {shape} should take bytes {begin} to {end}, the file does not hold them; it is "
            "cut short or damaged: download it again"
        )
    return SafetensorsTensor(dtype=str(fields["dtype"]), shape=tuple(shape), offset=start + begin, nbytes=end - begin)
