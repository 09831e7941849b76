"""One sampling backend a file. Each file exposes ``Backend``, made from a KernelBinder, and the operations that it
binds: with the kernels of each solution of those it is another backend."""

import importlib
import pkgutil
from typing import cast

from tokenspeed.device.sampling.backend import SamplingBackend
from tokenspeed.layers.kernels import KernelBinder


def backend_names() -> tuple[str, ...]:
    """The files of this folder: what `tokenspeed env` lists."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def make_backend(name: str, kernels: KernelBinder) -> SamplingBackend:
    """The backend of file ``name``; ValueError where there is none."""
    if name not in backend_names():
        raise ValueError(f"sampling backend {name!r} does not exist; there are {', '.join(backend_names())}")
    return cast(SamplingBackend, importlib.import_module(f"{__name__}.{name}").Backend(kernels))


def backend_operations(name: str) -> tuple[str, ...]:
    """The operations that the backend of file ``name`` binds."""
    return cast(tuple[str, ...], importlib.import_module(f"{__name__}.{name}").OPERATIONS)
