"""One attention backend a file. Each file exposes ``Backend``, which keeps the contract of ../backend.py, and the
operations that read what it prepares: with the kernels of each solution of those it is another backend."""

import importlib
import pkgutil
from typing import cast

from tokenspeed.device.attention.backend import AttentionBackendConstructor


def backend_names() -> tuple[str, ...]:
    """The files of this folder: what `tokenspeed env` lists."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def backend_class(name: str) -> AttentionBackendConstructor:
    """The backend of file ``name``; ValueError where there is none."""
    if name not in backend_names():
        raise ValueError(f"attention backend {name!r} does not exist; there are {', '.join(backend_names())}")
    return cast(AttentionBackendConstructor, importlib.import_module(f"{__name__}.{name}").Backend)


def backend_operations(name: str) -> tuple[str, ...]:
    """The operations that read what the backend of file ``name`` prepares; ValueError where there is no such file."""
    backend_class(name)
    return cast(tuple[str, ...], importlib.import_module(f"{__name__}.{name}").OPERATIONS)
