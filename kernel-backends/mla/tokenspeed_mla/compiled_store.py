"""Compiled kernels on disk, so that a process need not compile what an earlier one has.

A file is a variant's object code, host's and device's part, named by a digest of everything that it depends on: the
variant (with the compiler's version), the sources that are traced, the compiler's options, and the host's processor.
What depends on something else has another name, so nothing is ever out of date; old files may be deleted at any time.

The folder is TOKENSPEED_MLA_CACHE, by default tokenspeed/mla in XDG_CACHE_HOME or ~/.cache; an empty variable keeps
nothing. As its files are run, it must belong to this user, and nobody else may be able to write to it.
"""

import ctypes
import hashlib
import os
import platform
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "TOKENSPEED_MLA_CACHE"

_NAME = "kernel"
"""Of the function in every object."""


class StoreWarning(UserWarning):
    """The folder of compiled kernels cannot be used; kernels are compiled anew in every process."""


def folder() -> Path | None:
    """Where objects are kept, made if need be; None where nothing is to be kept, or where it cannot be: then with a
    StoreWarning."""
    given = os.environ.get(VARIABLE)
    if given == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = Path(given) if given else base / "tokenspeed" / "mla"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.stat()
    except OSError as error:
        _useless(place, str(error))
        return None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _useless(place, "it is another user's, or others may write to it, and its files are run")
        return None
    return place


def load(key: str) -> Any | None:
    """The kernel that was kept under a key, or None: also where what was kept cannot be read."""
    place = folder()
    if place is None or not (place / f"{key}.o").is_file():
        return None
    from cutlass.runtime import load_module

    try:
        return load_module(str(place / f"{key}.o"))[_NAME]
    except Exception:  # whatever the loader finds wrong with it: it is compiled anew, and replaced
        return None


def keep(key: str, compiled: Any) -> None:
    """Keeps a kernel under a key; a StoreWarning where that cannot be. Another process may do the same meanwhile: both
    write the same."""
    place = folder()
    if place is None:
        return
    from cutlass.runtime import find_runtime_libraries

    try:
        # The exporter looks up what the host's part calls.
        for library in find_runtime_libraries(enable_tvm_ffi=False):
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        with tempfile.TemporaryDirectory(dir=place) as draft:
            compiled.export_to_c(draft, _NAME)
            os.replace(Path(draft, f"{_NAME}.o"), place / f"{key}.o")
    except Exception as error:  # of the exporter or of the file system: a kernel that is not kept is a kernel still
        _useless(place, str(error))


def key_of(variant: object, options: str) -> str:
    """The digest of a variant, its sources, and how and where it is compiled."""
    digest = hashlib.sha256()
    for part in (repr(variant), options, platform.machine(), platform.system(), *_sources()):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


@cache
def _sources() -> tuple[str, ...]:
    """Names and texts of everything that is traced."""
    here = Path(__file__).parent
    files = sorted([*here.glob("kernels/*.py"), here / "addressing.py"])
    return tuple(part for file in files for part in (file.name, file.read_text(encoding="utf-8")))


def _useless(place: Path, why: str) -> None:
    warnings.warn(
        f"compiled MLA kernels are not kept in {place}: {why}; set {VARIABLE} to a folder of your own, or to nothing",
        StoreWarning,
        stacklevel=3,
    )
