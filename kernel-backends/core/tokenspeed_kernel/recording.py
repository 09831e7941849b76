"""Steps that are recorded once and made again with one call.

A step of the same shapes over the same memory makes the same kernel calls, so what the interpreter does between them
can be left out: CUDA graphs do so for a device, and a vendor's package for its own kernels. A kernel says in
``KernelSpec.recorder`` whose recorder notes its calls; a step can be recorded where all its kernels name the same one.

A device's graphs note whatever is launched, whoever launches it, so their kernels name no recorder. What they leave out
is the host's part: a kernel that waits for the device and plans on the host in each forward, as some of wrapped
libraries do, says so by the tag PLANS_ON_HOST. Replayed, it would go by the plan of the forward that was captured.
Where decodes are captured, none such is chosen for them (``binding_captured``), and one that a capture reaches all the
same refuses it (``refuse_capture``).
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch

from tokenspeed_kernel.registry import KernelSpec, active_registry

PLANS_ON_HOST = "plans_on_host"
"""Tag of a kernel that does work on the host in each forward, which no graph can hold."""

_Result = TypeVar("_Result")

Replay = Callable[[], None]
"""Makes the recorded calls again, in order, over the same memory."""


class RecordingError(RuntimeError):
    """A step that cannot be recorded; the message names what stood in the way."""


def refuse_capture(kernel: str) -> None:
    """What ``kernel``, which plans on the host, calls first: raises RecordingError where a GPU notes its calls."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise RecordingError(
            f"{kernel} plans each forward on the host, which a captured step would leave out; name another kernel for "
            "the operation (kernels), or set scheduler.graphs to off"
        )


class Recorder(Protocol):
    """Runs ``body`` once, as if alone, and returns its result and what makes its kernel calls again.

    The caller keeps all memory alive that the kernels touched. Raises RecordingError where ``body`` does work that a
    replay would leave out; that work may be done in part by then, and ``body`` is to be run again without recording.
    """

    def __call__(self, body: Callable[[], _Result]) -> tuple[_Result, Replay]: ...


def recorder_of(specs: Iterable[KernelSpec]) -> Recorder | str:
    """The recorder that notes the calls of all these kernels; else, in words, why there is none."""
    names: dict[str, str] = {}
    for spec in specs:
        if not spec.recorder:
            return f"{spec.name} cannot be recorded"
        names.setdefault(spec.recorder, spec.name)
    if not names:
        return "there is no kernel to record"
    if len(names) > 1:
        return " and ".join(f"{kernel} is recorded by {name}" for name, kernel in sorted(names.items()))
    (name,) = names
    found: Any = active_registry().recorder(name)
    return f"its kernels name the recorder {name!r}, which no package registered" if found is None else found


def register_recorder(name: str, recorder: Recorder) -> None:
    """Adds the recorder that kernels may name; raises RegistrationError where the name is taken."""
    active_registry().add_recorder(name, recorder)
