"""The emulated device is this process's for good; kernels are opaque to what watches the host."""

from collections.abc import Iterator
from typing import Any

import emulated_device
import pytest
from emulated_device import DEVICE, Emulation

from tokenspeed.layers.kernels import KernelBinder
from tokenspeed_kernel.binding import Bound

emulated_device.install()
_keep = KernelBinder._keep


def _opaque(self: KernelBinder, bound: Bound) -> Any:
    kernel = _keep(self, bound)

    def call(*arguments: Any, **named: Any) -> None:
        with DEVICE.kernel():
            kernel(*arguments, **named)

    return call


KernelBinder._keep = _opaque  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="session")
def _emulated() -> Iterator[None]:
    with Emulation():  # type: ignore[no-untyped-call]
        yield


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    DEVICE.underway.clear()
    DEVICE.copies.clear()
