"""Where a rank's tensors live, and how bytes get there and back.

The host's own memory is a placement too: arrays on the host and tensors on the device are one memory then, and nothing
here copies. On a device, what goes there or comes from there is pinned and asynchronous; whoever writes host memory
again, or reads what came, waits for the event behind that one copy, never for the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.layers.huge_memory import huge_zeros
from tokenspeed_kernel.accelerators import runtime_of
from tokenspeed_kernel.platform import known_kinds

_Number = TypeVar("_Number", bound=np.generic)

_REGISTERED_FROM = 64 << 20
"""Bytes from which host memory is pinned where it lies: PyTorch's own pinned memory comes in powers of two."""


class PlacementError(ValueError):
    """A device that the configuration asks for and this machine does not have."""


class Placement:
    """One rank's device, made once and handed to whatever makes tensors.

    Attributes:
        device: of every weight, cache and buffer of the rank.
        is_host: whether that is the host's own memory.
    """

    def __init__(self, device: torch.device, runtime: Any | None) -> None:
        """``runtime``: the module that speaks to the device (``torch.cuda``, ``torch.npu``); None of the host."""
        self.device = device
        self.is_host = runtime is None
        self._runtime = runtime
        self._copies: Any = None if runtime is None else runtime.Stream()

    @staticmethod
    def of(kind: str, rank: int) -> "Placement":
        """That of rank number ``rank`` of this machine, on devices of ``kind`` (ResolvedConfig.device): one rank a
        device. PlacementError where there is no such device."""
        kinds = known_kinds()
        if kind not in kinds:
            raise PlacementError(f"device {kind!r} is unknown; it is {', '.join(kinds)}")
        if kind == "cpu":
            return HOST
        runtime = runtime_of(kind)
        if runtime is None:
            raise PlacementError(
                f"device {kind!r}: PyTorch {torch.__version__} finds none on this machine; install the driver and a "
                "PyTorch built for it, or compute on the CPU"
            )
        count = int(runtime.device_count())
        if rank >= count:
            raise PlacementError(f"rank {rank} needs a device of its own, there are {count}; lower parallel.tp")
        runtime.set_device(rank)
        return Placement(torch.device(kind, rank), runtime)

    def enter(self) -> None:
        """What the present thread issues from here on goes to this device."""
        if self._runtime is not None:
            self._runtime.set_device(self.device.index)

    def memory(self) -> tuple[int, int]:
        """Bytes that are free on the device and those it has, what was let go counted as free. Not of the host."""
        assert self._runtime is not None, "the host's memory is asked for in tokenspeed.recipes.host"
        self._runtime.empty_cache()
        free, total = self._runtime.mem_get_info(self.device)
        return int(free), int(total)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def huge_zeros(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of zeros on the device; on the host in huge pages, of which untouched ones cost nothing."""
        return huge_zeros(nbytes) if self.is_host else self.zeros(nbytes, dtype=torch.uint8)

    def host_zeros(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of zeros on the host, which copies to and from the device may use without waiting."""
        if self.is_host:
            return huge_zeros(nbytes)
        if self.device.type != "cuda" or nbytes < _REGISTERED_FROM:
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        memory = huge_zeros(nbytes)
        assert self._runtime is not None, "the host's own memory needs no pinning"
        status = int(self._runtime.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if status:
            raise PlacementError(
                f"{nbytes} bytes of host memory cannot be pinned (error {status}); lower kv.host_bytes, or raise the "
                "limit on locked memory (ulimit -l)"
            )
        return memory

    def upload(self, values: NDArray[_Number]) -> torch.Tensor:
        """``values`` on the device, behind what was issued before; on the host the same memory. They may be written
        again at once."""
        tensor = torch.from_numpy(values)
        # Pinned memory that is let go is not given out again before the copies that were queued of it are done.
        return tensor if self.is_host else tensor.pin_memory().to(self.device, non_blocking=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Within the block, copies go on a stream of their own: behind all that was issued before the block, ahead of
        all that is issued behind it."""
        if self._runtime is None:
            yield
            return
        present = self._runtime.current_stream()
        self._copies.wait_stream(present)
        try:
            with self._runtime.stream(self._copies):
                yield
        finally:
            present.wait_stream(self._copies)

    def mark(self) -> "Mark":
        """See Mark."""
        return Mark(None if self._runtime is None else self._runtime.Event())


HOST = Placement(torch.device("cpu"), None)
"""The host's own memory."""


class Mark:
    """A place in the order of what is issued, which the host can wait for."""

    def __init__(self, event: Any | None) -> None:
        self._event = event
        self._is_set = False

    def set(self) -> None:
        """It is behind all that was issued so far on the present stream."""
        if self._event is not None:
            self._event.record()
            self._is_set = True

    def wait(self) -> None:
        """Returns once the device has come to where it was set last; at once where it was not."""
        if self._is_set:
            self._event.synchronize()  # type: ignore[union-attr]
            self._is_set = False


class Twin:
    """A piece of memory twice, of the same layout: pinned on the host, where it is written, and on the device. On the
    host's own memory both are one.

    Attributes:
        host: uint8 [nbytes]. Written between ``begin`` and ``upload`` only.
        device: uint8 [nbytes], on the device, at the same address for good.
    """

    def __init__(self, placement: Placement, nbytes: int) -> None:
        self.device = placement.zeros(nbytes, dtype=torch.uint8)
        self._source = self.device if placement.is_host else placement.host_zeros(nbytes)
        self.host: NDArray[np.uint8] = self._source.numpy()
        self._is_one = placement.is_host
        self._left = placement.mark()

    def begin(self) -> None:
        """Waits until what was uploaded last has left the host: it may be written again."""
        self._left.wait()

    def upload(self, nbytes: int) -> None:
        """Copies the first ``nbytes``; does not wait."""
        if not self._is_one:
            self.device[:nbytes].copy_(self._source[:nbytes], non_blocking=True)
            self._left.set()


class Landing:
    """What a step brings back to the host: copies into pinned memory, and one event behind all of them."""

    def __init__(self, placement: Placement) -> None:
        self._is_host = placement.is_host
        self._landed = placement.mark()

    def take(self, tensor: torch.Tensor) -> NDArray[Any]:
        """What ``tensor`` will hold when the device comes here; to be read behind ``wait``. Of the host's own memory it
        is the tensor's, which whoever keeps it must copy."""
        if not self._is_host:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = pinned.copy_(tensor, non_blocking=True)
            self._landed.set()
        return tensor.numpy()

    def wait(self) -> None:
        """Returns once all that was taken is there."""
        self._landed.wait()
