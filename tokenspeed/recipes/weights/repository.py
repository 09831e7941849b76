"""Repositories of the hub: what is here, what is missing, and bringing it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenspeed.recipes.features import describe_weights
from tokenspeed.recipes.schema import HuggingFaceWeights
from tokenspeed.recipes.weights.checking import compare, remove
from tokenspeed.recipes.weights.hub import Hub, HubFailure, explain, find_token, offline
from tokenspeed.recipes.weights.layout import (
    blob_path,
    cached_commit,
    is_commit,
    link,
    repository_folder,
    snapshot_path,
    write_reference,
)
from tokenspeed.recipes.weights.manifest import HubFile, Manifest, checked_contents, load_manifest, store_manifest
from tokenspeed.recipes.weights.places import (
    FetchError,
    Located,
    Progress,
    disk_bytes,
    file_size,
    hub_cache,
    make_room,
    only_one,
    unwritable,
)
from tokenspeed.recipes.weights.transfer import ATTEMPTS, bring_file, partial_path, wait_after
from tokenspeed.recipes.weights.wanted import wanted_files
from tokenspeed.recipes.weights.workers import Watch, run_shown

CACHE = "HF_HOME"
_WHOLE = 0.98
_SHOWN = 4


@dataclass(frozen=True)
class Pending:
    """What a fetch would do, with nothing done yet.

    Attributes:
        folder: the repository's in the hub's cache.
        manifest: what the hub lists at the commit, and what was checked here.
        wanted: the files the engine needs.
        unchecked: those of the right size whose checksum was never compared here.
        missing: those that are not here, or not whole.
        bytes_here: of ``missing``, what an earlier try has left.
    """

    folder: Path
    manifest: Manifest
    wanted: tuple[HubFile, ...]
    unchecked: tuple[HubFile, ...]
    missing: tuple[HubFile, ...]
    bytes_here: int

    @property
    def commit(self) -> str:
        """The commit that the revision stands for."""
        return self.manifest.commit

    @property
    def bytes_to_fetch(self) -> int:
        """Bytes that the network and the disk must give."""
        return sum(file.size for file in self.missing) - self.bytes_here

    @property
    def bytes_in_all(self) -> int:
        """Bytes of all wanted files."""
        return sum(file.size for file in self.wanted)


def locate_repository(weights: HuggingFaceWeights) -> Located:
    """Looks for a repository by sizes, in the cache only."""
    commit = cached_commit(weights)
    folder = repository_folder(weights.repository)
    snapshot = snapshot_path(folder, commit)
    if not commit or not snapshot.is_dir():
        return Located("", False)
    manifest = load_manifest(folder, commit)
    if manifest is None:
        return _locate_foreign(weights, snapshot)
    try:
        wanted = wanted_files(weights.repository, manifest.files, weights.format)
    except FetchError:
        return Located("", False)  # the fetch says why
    sizes = [file_size(snapshot / file.path) for file in wanted]
    whole = all(size == file.size for size, file in zip(sizes, wanted, strict=True))
    return Located(str(_model_path(snapshot, wanted)), whole, sum(max(size, 0) for size in sizes))


def _locate_foreign(weights: HuggingFaceWeights, snapshot: Path) -> Located:
    """Another program filled the cache: the index tells what is whole, else the recipe's bytes, maybe rounded ones."""
    size = disk_bytes(snapshot)
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return Located(str(snapshot), size >= weights.bytes * _WHOLE if weights.bytes else size > 0, size)
    try:
        content = json.loads(index.read_text("utf-8"))
        sizes = [file_size(snapshot / str(shard)) for shard in set(content["weight_map"].values())]
        at_least = int(content.get("metadata", {}).get("total_size", 1))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return Located(str(snapshot), False, size)
    return Located(str(snapshot), min(sizes, default=-1) > 0 and sum(sizes) >= at_least, size)


def _model_path(snapshot: Path, wanted: Sequence[HubFile]) -> Path:
    """A GGUF is served as a file, as other GGUFs of the repository may lie beside it; safetensors as their folder."""
    return snapshot / wanted[0].path if wanted[0].path.lower().endswith(".gguf") else snapshot


def survey(weights: HuggingFaceWeights, progress: Progress, token_file: Path | None = None) -> tuple[Hub, Pending]:
    """Asks the hub what the revision holds now and compares it with the cache; changes nothing. Raises FetchError."""
    if offline():
        raise _offline_error(weights)
    hub = Hub(find_token(token_file))
    what = f"ask the hub for {describe_weights(weights)}"
    progress(what, 0, 0)
    watch, failed = Watch(), 0
    while True:
        try:
            return hub, _compare(weights, hub.list_files(weights.repository, weights.revision))
        except HubFailure as failure:
            failed += 1
            if not failure.transient or failed >= ATTEMPTS:
                raise explain(failure, hub, weights.repository, weights.revision) from failure
            seconds = wait_after(failure, failed)
            progress(f"{what} ({failure.reason}; again in {seconds:.0f} s)", 0, 0)
            watch.pause(seconds, failure.reason)


def _compare(weights: HuggingFaceWeights, listed: Manifest) -> Pending:
    folder = repository_folder(weights.repository)
    wanted = wanted_files(weights.repository, listed.files, weights.format)
    contents = checked_contents(folder)
    manifest = listed.model_copy(update={"checked": {file.path for file in listed.files if file.checksum in contents}})
    # By content: two files of the same content are fetched once, one that did not change over commits not at all.
    missing: dict[str, HubFile] = {}
    unchecked: dict[str, HubFile] = {}
    for file in wanted:
        if _content(folder, listed.commit, file) is None:
            missing[file.checksum] = file
        elif file.checksum not in contents:
            unchecked[file.checksum] = file
    here = sum(_begun(folder, file) for file in missing.values())
    return Pending(folder, manifest, wanted, tuple(unchecked.values()), tuple(missing.values()), here)


def _begun(folder: Path, file: HubFile) -> int:
    """Bytes of a missing file that an earlier try has left."""
    return min(max(file_size(partial_path(blob_path(folder, file))), 0), file.size)


def _content(folder: Path, commit: str, file: HubFile) -> Path | None:
    """Where a file of the right size is, None where it is not."""
    for path in (snapshot_path(folder, commit) / file.path, blob_path(folder, file)):
        if file_size(path) == file.size:
            return path
    return None


def _offline_error(weights: HuggingFaceWeights) -> FetchError:
    """What is missing, and how to get it to a machine that may not ask the hub."""
    folder = repository_folder(weights.repository)
    commit = cached_commit(weights)
    manifest = load_manifest(folder, commit) if commit else None
    what = "what is here is not whole" if folder.is_dir() else "nothing of it is here"
    if manifest is not None:
        names = [f"{file.path} ({file.size:,} bytes)" for file in _compare(weights, manifest).missing]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        what = f"missing: {', '.join(names[:_SHOWN])}{more}"
    return FetchError(
        f"{describe_weights(weights)} is needed, and HF_HUB_OFFLINE=1 forbids to ask the hub; {what} "
        f"(looked in {folder})\n"
        f"on a machine with network: tokenspeed pull RECIPE, then copy {folder} here; or unset HF_HUB_OFFLINE"
    )


def fetch_repository(weights: HuggingFaceWeights, progress: Progress, token_file: Path | None = None) -> Path:
    """Brings what is missing, with every checksum compared; returns what to serve. Raises FetchError.

    What has come stays where a fetch ends early, and the next one goes on from there.
    """
    what = describe_weights(weights)
    hub, pending = survey(weights, progress, token_file)
    snapshot = snapshot_path(pending.folder, pending.commit)
    if _is_settled(weights, pending):  # nothing to write: the cache may be read-only
        return _model_path(snapshot, pending.wanted)
    make_room(pending.folder, pending.bytes_to_fetch, what, CACHE)
    try:
        lock = hub_cache() / ".locks" / pending.folder.name / "tokenspeed.lock"
        for folder in (lock.parent, pending.folder / "blobs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        with only_one(lock, lambda: progress(f"wait for another process that fetches {what}", 0, 0)):
            pending = _compare(weights, pending.manifest)  # another process may have been faster
            store_manifest(pending.folder, pending.manifest)
            _bring(hub, weights, pending, progress)
            for file in pending.wanted:
                link(pending.folder, pending.commit, file)
            if not is_commit(weights.revision):
                write_reference(weights, pending.commit)
    except OSError as error:
        raise unwritable(Path(error.filename or pending.folder), error, CACHE) from error
    return _model_path(snapshot, pending.wanted)


def _is_settled(weights: HuggingFaceWeights, pending: Pending) -> bool:
    """Whether everything is here, checked, in its place and noted."""
    if pending.missing or pending.unchecked or load_manifest(pending.folder, pending.commit) is None:
        return False
    return cached_commit(weights) == pending.commit and locate_repository(weights).present


def _bring(hub: Hub, weights: HuggingFaceWeights, pending: Pending, progress: Progress) -> None:
    """Checks what was never checked, then fetches what is missing or was found to be damaged."""
    what = describe_weights(weights)
    to_check = [partial(_check_one, pending, file) for file in pending.unchecked]
    run_shown(f"check {what}", to_check, Watch(), sum(file.size for file in pending.unchecked), progress)
    pending = _compare(weights, pending.manifest)
    to_fetch = [partial(_fetch_one, hub, weights, pending, file) for file in pending.missing]
    watch = Watch(pending.bytes_in_all - pending.bytes_to_fetch)
    run_shown(f"download {what}", to_fetch, watch, pending.bytes_in_all, progress)


def _check_one(pending: Pending, file: HubFile, watch: Watch) -> None:
    path = _content(pending.folder, pending.commit, file)
    if path is None:
        return
    if compare(path, file, watch) == file.checksum:
        store_manifest(pending.folder, pending.manifest, file.path)
    else:
        remove(path)


def _fetch_one(hub: Hub, weights: HuggingFaceWeights, pending: Pending, file: HubFile, watch: Watch) -> None:
    try:
        bring_file(hub, weights.repository, pending.commit, file, pending.folder, watch)
    except HubFailure as failure:
        raise explain(failure, hub, weights.repository, weights.revision, file.path) from failure
    store_manifest(pending.folder, pending.manifest, file.path)
