"""What a repository holds at a commit, as the hub listed it, and which files of it were found to be right here.

It is kept in the hub's cache beside the snapshot, so that sizes and checksums can be compared without the hub, and so
that it goes where the cache goes. A commit never changes, so neither does its list.
"""

import hashlib
import os
import threading
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError


def _inside(value: str) -> str:
    parts = value.split("/")
    if value.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\\" in value:
        raise ValueError("a path that leads out of the repository")
    return value


class HubFile(BaseModel):
    """A file of a repository: ``sha256`` of its content where the hub knows it (large files), else git's ``blob``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: Annotated[str, AfterValidator(_inside)]
    size: Annotated[int, Field(ge=0)]
    blob: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    @property
    def checksum(self) -> str:
        """What ``digest`` must come to; also the name of the content in the hub's cache."""
        return self.sha256 or self.blob

    @property
    def checksum_name(self) -> str:
        """How to call it in a message."""
        return "sha256" if self.sha256 else "git's sha1"

    def digest(self) -> "hashlib._Hash":
        """A digest that, fed with the content, comes to ``checksum``."""
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class Manifest(BaseModel):
    """All files of ``repository`` at ``commit``, and the paths of those whose checksum was compared on this machine."""

    model_config = ConfigDict(extra="ignore")

    version: Literal[1] = 1
    repository: str
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    files: tuple[HubFile, ...]
    checked: set[str] = set()


def manifest_path(folder: Path, commit: str) -> Path:
    """Where the manifest of a commit is kept; ``folder`` is the repository's in the hub's cache."""
    return folder / "tokenspeed" / f"{commit}.json"


def load_manifest(folder: Path, commit: str) -> Manifest | None:
    """Reads a manifest; None where there is none that can be read (it is made anew by the next pull)."""
    try:
        return Manifest.model_validate_json(manifest_path(folder, commit).read_bytes())
    except (OSError, ValidationError):
        return None


def checked_contents(folder: Path) -> set[str]:
    """Checksums of all contents that were compared on this machine, whichever commit they were fetched for."""
    found: set[str] = set()
    for path in (folder / "tokenspeed").glob("*.json"):
        manifest = load_manifest(folder, path.stem)
        if manifest is not None:
            found.update(file.checksum for file in manifest.files if file.path in manifest.checked)
    return found


_STORING = threading.Lock()


def store_manifest(folder: Path, manifest: Manifest, checked: str | None = None) -> None:
    """Writes a manifest, in one step for whoever reads it, with the path ``checked`` added. Raises OSError.

    Workers call it side by side.
    """
    path = manifest_path(folder, manifest.commit)
    with _STORING:
        if checked is not None:
            manifest.checked.add(checked)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(manifest.model_dump_json(indent=1), "utf-8")
        os.replace(beside, path)
