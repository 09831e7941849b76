"""One file over HTTP: it goes on where it broke off, is hashed on the way, and gets its name once it is right.

huggingface_hub 2 fetches a file that broke off from its beginning (its temporary names are for one process only), and
one shard can be 10 GB: so the bytes are moved here, over its client. The result is its cache's layout.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tokenspeed.recipes.weights.checking import compare, remove
from tokenspeed.recipes.weights.hub import Hub, HubFailure, failures
from tokenspeed.recipes.weights.layout import blob_path
from tokenspeed.recipes.weights.manifest import HubFile
from tokenspeed.recipes.weights.places import FetchError, hub_cache
from tokenspeed.recipes.weights.workers import Watch

ATTEMPTS = 6
"""Failures in a row, without one new byte, before a file is given up."""

LARGEST_OVER_HTTP = 50 * 10**9
"""The hub does not send more in one answer: larger files are left to huggingface_hub, which has a protocol for them."""

FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_CHUNK = 1 << 20


def partial_path(blob: Path) -> Path:
    """Where a file grows until it is whole and right."""
    return blob.with_name(f"{blob.name}.incomplete")


def wait_after(failure: HubFailure, failed: int) -> float:
    """Seconds to wait after the ``failed``-th failure in a row: what the hub asks for, else ever longer."""
    return failure.wait_s or min(FIRST_WAIT_S * 2 ** (failed - 1), _LONGEST_WAIT_S)


def bring_file(hub: Hub, repository: str, commit: str, file: HubFile, folder: Path, watch: Watch) -> None:
    """Brings the content of ``file`` to the cache ``folder`` of its repository, checksum compared.

    The bytes of an earlier try must be in ``watch.done`` already. Raises HubFailure, OSError, Stopped, or FetchError
    where what comes is not what the hub lists.
    """
    if file.size > LARGEST_OVER_HTTP:
        _bring_by_library(hub, repository, commit, file, watch)
        return
    address = hub.file_address(repository, commit, file.path)
    partial = partial_path(blob_path(folder, file))
    for _ in range(2):
        found = _complete(hub, address, file, partial, watch)
        if found == file.checksum:
            os.replace(partial, blob_path(folder, file))
            return
        # Bytes of an earlier try may be damaged: the second time everything comes anew.
        partial.unlink()
        watch.add(-file.size)
    raise FetchError(
        f"{file.path}: {file.checksum_name} of what came is {found}, the hub lists {file.checksum}, twice: a proxy or "
        "mirror on the way alters it; name another by HF_ENDPOINT"
    )


def _bring_by_library(hub: Hub, repository: str, commit: str, file: HubFile, watch: Watch) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        with failures():
            path = hf_hub_download(
                repository,
                file.path,
                revision=commit,
                cache_dir=hub_cache(),
                endpoint=hub.address,
                token=hub.token.value or False,
            )
    except (ValueError, RuntimeError) as error:
        raise HubFailure(str(error).strip().splitlines()[0], transient=False) from error
    found = compare(Path(path), file, watch)
    if found != file.checksum:
        remove(Path(path))
        raise FetchError(f"{file.path}: {file.checksum_name} of what came is {found}, the hub lists {file.checksum}")


def _complete(hub: Hub, address: str, file: HubFile, partial: Path, watch: Watch) -> str:
    """Brings ``partial`` to its full size; returns the digest of its content."""
    with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as out:
        digest = file.digest()
        size = 0
        while size < file.size and (chunk := out.read(min(_CHUNK, file.size - size))):
            digest.update(chunk)
            size += len(chunk)
            watch.check()
        out.truncate(size)
        failed = 0
        while size < file.size:
            before = size
            try:
                with _open(hub, address, size) as (offset, chunks):
                    if offset != size:  # the server sends the whole file
                        watch.add(offset - size)
                        size, before, digest = offset, offset, file.digest()
                        out.truncate(out.seek(size))
                    for chunk in chunks:
                        kept = chunk[: file.size - size]
                        watch.check()
                        out.write(kept)
                        digest.update(kept)
                        size += len(kept)
                        watch.add(len(kept))
                        if size == file.size:
                            break
                if size < file.size:
                    raise HubFailure("the connection ended early", transient=True)
            except HubFailure as failure:
                failed = 1 if size > before else failed + 1
                if not failure.transient or failed >= ATTEMPTS:
                    raise
                watch.pause(wait_after(failure, failed), f"{file.path}: {failure.reason}")
        _sync(out)
        return digest.hexdigest()


def _sync(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())


@contextmanager
def _open(hub: Hub, address: str, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Asks for the bytes from ``start``; gives the offset at which the answer begins, and its bytes.

    Raises HubFailure, also in the place of errors that come while the bytes are read.
    """
    from huggingface_hub import constants, get_session, hf_raise_for_status

    headers = {**hub.headers, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with (
        failures(),
        get_session().stream("GET", address, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer,
    ):
        hf_raise_for_status(answer)
        ranged = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        yield start if ranged else 0, answer.iter_bytes()
