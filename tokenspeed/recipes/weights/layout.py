"""Where things lie in the hub's cache, as huggingface_hub has it, so that both find each other's files.

``models--owner--name/blobs/<checksum>`` holds contents, ``snapshots/<commit>/<path>`` links to them, and
``refs/<revision>`` says which commit a name was last.
"""

import os
import re
import shutil
from pathlib import Path

from tokenspeed.recipes.schema import HuggingFaceWeights
from tokenspeed.recipes.weights.manifest import HubFile
from tokenspeed.recipes.weights.places import file_size, hub_cache

_SMALL = 1 << 20


def repository_folder(repository: str) -> Path:
    """The folder of a repository in the hub's cache."""
    return hub_cache() / f"models--{repository.replace('/', '--')}"


def blob_path(folder: Path, file: HubFile) -> Path:
    """Where the content of a file lies."""
    return folder / "blobs" / file.checksum


def snapshot_path(folder: Path, commit: str) -> Path:
    """The folder with the files of a commit."""
    return folder / "snapshots" / commit


def is_commit(revision: str) -> bool:
    """Whether a revision is a full commit, which never moves."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def cached_commit(weights: HuggingFaceWeights) -> str:
    """The commit of the recipe's revision as far as this machine knows, "" where it does not."""
    if is_commit(weights.revision):
        return weights.revision
    try:
        text = _reference(weights).read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if is_commit(text) else ""


def write_reference(weights: HuggingFaceWeights, commit: str) -> None:
    """Keeps which commit a moving revision was last. Raises OSError."""
    path = _reference(weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(commit, "ascii")
    os.replace(beside, path)


def _reference(weights: HuggingFaceWeights) -> Path:
    if any(part in ("", ".", "..") for part in weights.revision.split("/")):
        raise ValueError(f"{weights.revision!r} is no revision")
    return repository_folder(weights.repository) / "refs" / weights.revision


def link(folder: Path, commit: str, file: HubFile) -> None:
    """Gives a content its name in the snapshot; where the file system has no links, the content goes there itself.

    Raises OSError.
    """
    path, blob = snapshot_path(folder, commit) / file.path, blob_path(folder, file)
    if file_size(path) == file.size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:
        if file.size < _SMALL:  # small files may have the same content under two names
            shutil.copyfile(blob, path)
        else:
            os.replace(blob, path)
