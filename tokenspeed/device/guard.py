"""Forbids tensor operations on the control plane's thread, for tests and for hunting a violation."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch.utils._python_dispatch import TorchDispatchMode

GUARD_VARIABLE = "TOKENSPEED_GUARD_CONTROL_PLANE"


class ControlPlaneViolation(RuntimeError):
    """A tensor operation ran on a thread that must not touch a device."""


class ControlPlaneGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, every tensor operation of the current thread raises ControlPlaneViolation.

    Other threads (the forward thread) are not concerned: torch keeps its modes for each thread.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        raise ControlPlaneViolation(
            f"{func} ran on the control plane's thread; ask the device handle for it, or do it in the builder"
        )


def control_plane_guard() -> AbstractContextManager[object]:
    """The guard where TOKENSPEED_GUARD_CONTROL_PLANE is set to something other than 0, else nothing."""
    if os.environ.get(GUARD_VARIABLE, "0") not in ("", "0"):
        return cast(AbstractContextManager[object], ControlPlaneGuard())  # type: ignore[no-untyped-call]
    return nullcontext()
