"""Comparing what is here with its checksums, without network, and removing what is damaged."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenspeed.recipes.features import describe_weights
from tokenspeed.recipes.schema import HuggingFaceWeights, PackageWeights
from tokenspeed.recipes.weights.layout import cached_commit, repository_folder, snapshot_path
from tokenspeed.recipes.weights.manifest import HubFile, load_manifest
from tokenspeed.recipes.weights.package import package_target
from tokenspeed.recipes.weights.places import Progress
from tokenspeed.recipes.weights.wanted import wanted_files
from tokenspeed.recipes.weights.workers import Watch, run_shown

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Damage:
    """A file that is not what it should be, and how it differs."""

    path: Path
    why: str


@dataclass(frozen=True)
class Report:
    """``files`` of ``size`` bytes in all were compared; ``known`` False: nothing here says what they should be."""

    files: int
    size: int
    damaged: tuple[Damage, ...] = ()
    known: bool = True


def check_repository(weights: HuggingFaceWeights, progress: Progress) -> Report:
    """Compares all files that the engine needs with what the hub listed. Raises OSError, or FetchError."""
    folder, commit = repository_folder(weights.repository), cached_commit(weights)
    manifest = load_manifest(folder, commit)
    if manifest is None:
        return Report(0, 0, known=False)
    wanted = wanted_files(weights.repository, manifest.files, weights.format)
    return _check(describe_weights(weights), snapshot_path(folder, commit), wanted, "the hub lists", progress)


def check_package(weights: PackageWeights, progress: Progress) -> Report:
    """Compares the file with the recipe's checksum. Raises OSError."""
    path = package_target(weights)
    file = HubFile(path=path.name, size=path.stat().st_size, blob="0" * 40, sha256=weights.member_sha256)
    return _check(describe_weights(weights), path.parent, (file,), "the recipe says", progress)


def _check(what: str, folder: Path, files: tuple[HubFile, ...], who_says: str, progress: Progress) -> Report:
    found: dict[str, str] = {}

    def look(file: HubFile, watch: Watch) -> None:
        found[file.path] = compare(folder / file.path, file, watch)

    total = sum(file.size for file in files)
    run_shown(f"check {what}", [partial(look, file) for file in files], Watch(), total, progress)
    damaged = tuple(
        Damage(folder / file.path, f"{file.checksum_name} is {found[file.path]}, {who_says} {file.checksum}")
        for file in files
        if found[file.path] != file.checksum
    )
    return Report(len(files), total, damaged)


def compare(path: Path, file: HubFile, watch: Watch) -> str:
    """The digest of what is at ``path``, to compare with the file's checksum. Raises OSError, Stopped."""
    digest = file.digest()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            watch.check()
            digest.update(chunk)
            watch.add(len(chunk))
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Removes a file, and the content that it links to. Raises OSError."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
