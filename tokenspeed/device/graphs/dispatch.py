"""Graphs of CPU tensors: a recorder of torch's dispatcher, to see without a device whether a forward can be captured.

It captures what a device's graph would, and refuses what one would: reading on the host what a kernel computes. Its
replay reads whatever lies in the captured addresses, with every value of the host's frozen; so a tensor made anew each
step, a stale number or a branch on data becomes a wrong token, here and not on the first GPU. ``scheduler.graphs:
dispatch`` serves with it; it is for tests and for hunting such a mistake, and no faster than running plainly.

Kernels are noted in two ways. On a device a kernel is one launch, and so is here every native kernel, and every
reference that walks rows or experts on the host in place of a grid. Other references are noted operation by operation.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed.device.graphs.provider import Graph, GraphCaptureError, capture_between
from tokenspeed.device.graphs.stream_graphs import WARM_RUNS
from tokenspeed.device.graphs.tape import Tape, tensors_of
from tokenspeed_kernel.registry import Band, KernelSpec

_Result = TypeVar("_Result")

WALKED_BY_THE_HOST = frozenset(
    {
        "attention.compress",
        "attention.decode",
        "attention.extend",
        "attention.index_select",
        "attention.mla_decode",
        "attention.mla_extend",
        "attention.mla_extend_expanded",
        "attention.mla_selected",
        "embedding.lookup",
        "moe.experts",
        "recurrent.causal_conv",
        "recurrent.gated_delta",
    }
)
"""Operations whose references have a loop of the host's where a kernel has a grid."""

_READ_BY_THE_HOST = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


class _HostReads(TorchFunctionMode):
    """Refuses what hands a tensor's values to the host past the dispatcher."""

    def __init__(self, recorder: "DispatchGraphs") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READ_BY_THE_HOST and self._recorder.notes_operations:
            raise GraphCaptureError(_read_on_the_host(f"Tensor.{name}"))
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation of the thread."""

    def __init__(self, recorder: "DispatchGraphs") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode; keeping the compiler away would import it, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if not self._recorder.notes_operations:
            return func(*args, **given)
        # In inference mode operations come here before they are taken apart, and what is inside would not be seen.
        with self:
            result = func.decompose(*args, **given)
        if result is NotImplemented:
            _refuse(func, args)
            result = func(*args, **given)
            self._recorder.tape.note_operation(func, args, given, result)
        return result


def _refuse(operation: Any, args: tuple[Any, ...]) -> None:
    """Raises GraphCaptureError for what a graph of a device could not make again."""
    tags = set(operation.tags)
    if operation is torch.ops.aten.index.Tensor and not any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_of(args[1:])
    ):
        tags.discard(torch.Tag.dynamic_output_shape)  # places, not a mask: there are as many results as places
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        raise GraphCaptureError(_read_on_the_host(str(operation)))
    if torch.Tag.nondeterministic_seeded in tags:
        raise GraphCaptureError(
            f"{operation} draws from a generator, and each replay would draw the same numbers; draw outside of what is "
            "captured"
        )


def _read_on_the_host(what: str) -> str:
    return (
        f"{what} reads on the host what a kernel computes, which a captured forward cannot do: the value would be "
        "frozen in all replays. Prepare it with the metadata, or keep it on the device"
    )


@dataclass(frozen=True, slots=True)
class DispatchGraph:
    """A tape; ``poisoned``: what it has of its own is filled with NaN before each replay."""

    tape: Tape
    poisoned: bool

    def replay(self, before: NDArray[np.int32], rows: int) -> None:  # noqa: ARG002 - the protocol has it
        if self.poisoned:
            self.tape.poison()
        self.tape.replay()


class DispatchGraphs:
    """The provider; ``around`` must be put around every kernel that a captured forward may call.

    Attributes:
        tape: what is captured at present.
        notes_operations: whether operations of torch are; they are not inside of a kernel that is noted whole.
    """

    name = "dispatch recorder"
    as_it_runs = False

    def __init__(self, *, poisoned: bool = True) -> None:
        self._poisoned = poisoned
        self._modes: ExitStack | None = None
        self.tape = Tape()
        self.notes_operations = False

    def around(self, spec: KernelSpec, kernel: Callable[..., None]) -> Callable[..., None]:
        """``kernel``, noted as one call where it is to be."""
        if spec.band is Band.REFERENCE and spec.operation not in WALKED_BY_THE_HOST:
            return kernel
        return self.launched(kernel)

    def launched(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """``kernel``, each call of which is noted as one."""

        def noted(*args: Any) -> None:
            if not self.notes_operations:
                kernel(*args)
                return
            self.notes_operations = False
            try:
                self.tape.note_kernel(kernel, args)
                kernel(*args)
            finally:
                self.notes_operations = True

        return noted

    def warm_up(self, body: Callable[[], object]) -> None:
        """As often as on a device: what a forward does at its first time alone (a cache it fills) is not captured."""
        for _ in range(WARM_RUNS):
            body()

    def capture(self, body: Callable[[], _Result]) -> tuple[_Result, Graph]:
        """See GraphProvider; the work is done as it is noted, and the result is valid."""
        return capture_between(self, body)

    def begin(self) -> None:
        """See PieceProvider; of this thread."""
        self.tape = Tape()
        with ExitStack() as modes:
            modes.enter_context(_HostReads(self))
            modes.enter_context(_Operations(self))
            self._modes = modes.pop_all()
        self.notes_operations = True

    def end(self) -> Graph:
        """See PieceProvider."""
        self.abandon()
        return DispatchGraph(self.tape, self._poisoned)

    def abandon(self) -> None:
        """See PieceProvider."""
        self.notes_operations = False
        modes, self._modes = self._modes, None
        if modes is not None:
            modes.close()

    def synchronize(self) -> None:
        """Everything is done when it returns."""
