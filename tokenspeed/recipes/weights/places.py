"""Folders that weights are kept in, room and locks in them, and what a path holds."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.resolved import ModelSource

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))

Progress = Callable[[str, int, int], None]
"""Called with what happens, and bytes done and in all (0: unknown)."""


class FetchError(RuntimeError):
    """Weights could not be fetched or are damaged; the message names what, why, and the way out."""


@dataclass(frozen=True)
class Located:
    """Weights on this machine: ``path`` is where they are or will be, "" where only a download can tell."""

    path: str
    present: bool
    bytes_on_disk: int = 0


def hub_home() -> Path:
    """The folder of all that belongs to the hub: HF_HOME, by the rules of huggingface_hub.

    Its constants would say the same, but are read once, at import, which takes longer than looking for weights.
    """
    home = os.environ.get("HF_HOME")
    if home is None:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(home))).absolute()


def hub_cache() -> Path:
    """The folder of downloaded repositories: HF_HUB_CACHE, else "hub" in HF_HOME."""
    chosen = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE"))
    if chosen is None:
        return hub_home() / "hub"
    return Path(os.path.expandvars(os.path.expanduser(chosen))).absolute()


def source_of_path(text: str) -> ModelSource:
    """Looks at a file or folder and says what it is; raises RecipeError where it is nothing the engine reads."""
    path = Path(text).expanduser().absolute()
    if not path.exists():
        if any(mark.exists() for mark in _CONTAINER_MARKS):
            raise RecipeError(
                f"{path}: there is no such file or folder in this container; mount it: --volume {path}:{path}:ro"
            )
        raise RecipeError(f"{path}: there is no such file or folder")
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise RecipeError(
                f"{path}: this is no GGUF file (it begins with {magic!r}); "
                "give a .gguf file, or a folder with config.json, *.safetensors and tokenizer.json"
            )
        return ModelSource(kind="gguf", path=str(path))
    if (path / "config.json").is_file():
        return ModelSource(kind="folder", path=str(path))
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1 or (files and _is_split(files)):
        return source_of_path(str(files[0]))
    found = f"{len(files)} .gguf files ({', '.join(file.name for file in files)}); name one" if files else "neither"
    meant = _models_inside(path)
    if meant:
        found = "a cache of the hub, whose models lie deeper: give " + " or ".join(str(folder) for folder in meant)
    raise RecipeError(f"{path}: expected config.json or one .gguf file in this folder, found {found}")


def _is_split(files: Sequence[Path]) -> bool:
    """Whether the files, sorted, are all parts of one model."""
    count = len(files)
    stem = files[0].name.removesuffix(f"-00001-of-{count:05}.gguf")
    return [file.name for file in files] == [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _models_inside(path: Path) -> list[Path]:
    """Snapshots, where ``path`` is a folder of the hub's cache above them; at most three."""
    for pattern in ("*", "snapshots/*", "models--*/snapshots/*", "hub/models--*/snapshots/*"):
        found = [folder for folder in sorted(path.glob(pattern)) if folder.parent.name == "snapshots"]
        if found:
            return found[:3]
    return []


def disk_bytes(path: Path) -> int:
    """Bytes of the weights at a file or folder; 0 where there are none."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.gguf") for file in path.glob(pattern))


def file_size(path: Path) -> int:
    """Bytes of a file, through links; -1 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def make_room(folder: Path, needed: int, what: str, variable: str) -> None:
    """Creates ``folder`` and sees that ``needed`` bytes fit; raises FetchError, naming the ``variable`` for another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error, variable) from error
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{what} needs {_amount(needed)} of disk, {folder} has {_amount(free)} free; "
            f"set {variable} to a folder with room"
        )


def _amount(count: int) -> str:
    """Bytes in decimal units, as disks and repositories are measured."""
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"


def unwritable(path: Path, error: OSError, variable: str) -> FetchError:
    """The FetchError for a file or folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError(
            f"{path}: the disk is full ({error.strerror}); what has come is kept: make room and run the same again, "
            f"or set {variable} to a folder with room"
        )
    return FetchError(
        f"{path}: cannot be written ({error.strerror or error}); set {variable} to a folder that this user may write"
    )


@contextmanager
def only_one(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file ``path``, so that two starts at the same time download once; the system frees it at the end
    of the process, however that comes. ``waiting`` is called once where another process holds it.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
