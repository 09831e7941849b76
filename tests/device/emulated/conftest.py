"""The emulated device is this process's for good, so only of one that was started for it: whoever collects the tests
around this folder loads this file too. Kernels are opaque to what watches the host."""

import os
from collections.abc import Iterator
from typing import Any

import emulated_device
import pytest
from emulated_device import Emulation
from emulated_streams import DEVICE

from tokenspeed.layers.kernels import KernelBinder
from tokenspeed_kernel.binding import Bound

_keep = KernelBinder._keep


def _opaque(self: KernelBinder, bound: Bound) -> Any:
    kernel = _keep(self, bound)

    def call(*arguments: Any, **named: Any) -> None:
        with DEVICE.kernel():
            kernel(*arguments, **named)

    return call


if "TOKENSPEED_TEST_EMULATED" in os.environ:
    emulated_device.install()
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
