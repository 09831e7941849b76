"""Records the kernel calls of a step and makes them again with one call; see tokenspeed_kernel.recording."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed_kernel.recording import RecordingError
from tokenspeed_kernel_cpu import _native

_Result = TypeVar("_Result")


class _NoTensorWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every torch operation that computes: a replay would leave it out. Views are free to be made."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode; keeping the compiler away would import it, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {})) if getattr(func, "is_view", False) else None
        # Of some operations (``to``) the schema says only that the result may be a view.
        if result is None or not _are_views(result, args):
            raise RecordingError(
                f"{func} ran beside the kernels of a step that is recorded, and a replay would leave it out; "
                "make it a kernel, or do it before or after"
            )
        return result


def _are_views(result: Any, args: Any) -> bool:
    """Whether all tensors of ``result`` lie in the memory of the first argument's."""
    results = result if isinstance(result, list | tuple) else (result,)
    memory = args[0].untyped_storage().data_ptr()
    return all(tensor.untyped_storage().data_ptr() == memory for tensor in results)


def record(body: Callable[[], _Result]) -> tuple[_Result, Callable[[], None]]:
    """Runs ``body`` once and returns its result and what makes its kernel calls again; see the core's Recorder."""
    recording = _native.Recording()
    with _NoTensorWork():  # type: ignore[no-untyped-call]
        recording.begin()
        try:
            result = body()
        finally:
            recording.end()
    return result, recording.replay
