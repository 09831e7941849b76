"""Headers of safetensors files, and which files of a folder are the checkpoint. No torch, and no tensor is read."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.model_config import CheckpointError

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, kw_only=True)
class SafetensorsTensor:
    """Where a tensor lies: ``dtype`` as the file names it ("BF16"), ``offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_checkpoint_headers(folder: Path) -> Iterator[tuple[Path, dict[str, SafetensorsTensor]]]:
    """Every file of the checkpoint in ``folder`` with its tensors by name.

    The files are those that the index names, else model.safetensors, else all there are. Raises CheckpointError where
    there is none, one is missing or damaged, or does not hold a tensor that the index says lies in it.
    """
    places = _index(folder)
    for path in _files(folder, places):
        tensors = read_safetensors_header(path)
        missing = sorted(name for name, file in places.items() if file == path.name and name not in tensors)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{path}: {missing[0]}{more} should lie here, says {INDEX}, and does not; the file is of another "
                "checkpoint: download both again"
            )
        yield path, tensors


def _index(folder: Path) -> dict[str, str]:
    """Tensor to file as the index has it; empty where there is no index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        places = json.loads(path.read_text("utf-8"))["weight_map"]
        if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
            raise ValueError("weight_map should be an object of file names")
        return places
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged index ({error}); download it again") from error


def _files(folder: Path, places: dict[str, str]) -> list[Path]:
    if places:
        paths = [folder / name for name in sorted(set(places.values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {', '.join(missing)} named by {INDEX} is missing; download it again")
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    paths = sorted(folder.glob("*.safetensors"))
    if paths:
        return paths
    pickles = sorted(path.name for ending in _PICKLES for path in folder.glob(f"*{ending}"))
    if pickles:
        raise CheckpointError(
            f"{folder}: holds {pickles[0]} and no *.safetensors file; such files are pickles, which may run code when "
            "they are read, so they never are: take the checkpoint's safetensors, or convert it where its publisher is "
            "trusted"
        )
    raise CheckpointError(f"{folder}: holds no *.safetensors file; convert the checkpoint to safetensors")


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
