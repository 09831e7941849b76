"""What a kernel is, as a digest: its specification and the code of the package it comes from.

A latency that was measured on this machine counts for the code it was measured with. The whole package is read,
native modules included: coarse, but nothing that can change a kernel's speed is missed for being in another file.
"""

import hashlib
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tokenspeed_kernel.registry import KernelFunction, KernelSpec, RegisteredKernel

CODE_SUFFIXES = (".py", ".pyc", ".so", ".pyd", ".dylib", ".cubin", ".hsaco", ".ptx")

CORE_DISTRIBUTION = "tokenspeed-appliance-kernel"


def _files_of(package: str) -> list[Path]:
    module = sys.modules.get(package)
    places = getattr(module, "__path__", None)
    if places is not None:
        return sorted({path for place in places for path in _code_at(Path(place))})
    file = getattr(module, "__file__", None)
    return [Path(file)] if file is not None else []


def _code_at(place: Path) -> list[Path]:
    """The code files below a folder, compiled ones where they stand for sources; or the wheel that ``place`` is in."""
    if place.is_dir():
        found = [path for path in place.rglob("*") if path.suffix in CODE_SUFFIXES]
        return [path for path in found if path.parent.name != "__pycache__"]
    return [parent for parent in place.parents if parent.is_file()]


@cache
def package_digest(package: str) -> str:
    """Of the code files of an imported top-level package or module; read once a process."""
    digest = hashlib.sha256()
    for path in _files_of(package):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _module_of(fn: KernelFunction) -> str:
    name = getattr(fn, "__module__", None) or type(fn).__module__
    return str(name)


def _specification(spec: KernelSpec) -> str:
    traits = sorted(f"{name}: {bound}" for name, bound in spec.traits.items())
    fields = (spec.name, spec.version, spec.operation, spec.solution, spec.band.name, sorted(map(str, spec.signatures)))
    return repr((fields, traits, sorted(spec.tags)))


def kernel_digest(kernel: RegisteredKernel) -> str:
    """Sixteen hexadecimal digits that change with the kernel's specification and with the code of its package."""
    digest = hashlib.sha256(_specification(kernel.spec).encode())
    digest.update(package_digest(_module_of(kernel.fn).partition(".")[0]).encode())
    return digest.hexdigest()[:16]


def core_version() -> str:
    """The version of this package; "not installed" where it runs from a bare folder."""
    try:
        return version(CORE_DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"
