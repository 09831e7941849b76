"""A device in the host's memory, for proofs without hardware: PyTorch's "npu", strict and asynchronous.

Its tensors really compute, but refuse to meet the host's in an operation, and whatever would make the host wait for the
device is refused while ``watching``. Asynchronous copies take the licence that a device's have: what comes to the host
is rubbish until an event behind the copy was waited for, what goes to the device must not change on the host before
that, and a stream sees another one's copies only where it waited for it.

A process that called ``install`` has the device for good, so its tests have a process of their own.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from emulated_streams import DEVICE, Copy, Event, Stream, brought, on_stream
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
RUBBISH = 0xA5

_WAITING = {
    aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default,
    aten.equal.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default,
}  # fmt: skip
"""Operations whose result the host needs before it can go on."""

_TRANSFERS = {aten.copy_.default, aten._to_copy.default, aten.to.dtype_layout, aten.to.device, aten.to.other}


class MixedDevices(RuntimeError):
    """An operation over a tensor of the device and one of the host."""


class _Held:
    """What of the device's memory is held: storages that some tensor of it has.

    Attributes:
        bytes: held now; ``peak``: the most of them since ``start``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a tensor may be let go while another is added
        self._tensors: dict[int, int] = {}
        self.bytes = self.peak = 0

    def start(self) -> int:
        """Begins to look for a peak; what is held now."""
        gc.collect()
        self.peak = self.bytes
        return self.bytes

    def add(self, tensor: "DeviceTensor") -> None:
        storage = torch.Tensor.untyped_storage(tensor.inner)
        key, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            self._tensors[key] = self._tensors.get(key, 0) + 1
            if self._tensors[key] == 1:
                self.bytes += nbytes
                self.peak = max(self.peak, self.bytes)
        weakref.finalize(tensor, self._drop, key, nbytes).atexit = False

    def _drop(self, key: int, nbytes: int) -> None:
        with self._lock:
            self._tensors[key] -= 1
            if not self._tensors[key]:
                del self._tensors[key]
                self.bytes -= nbytes


HELD = _Held()


class DeviceTensor(torch.Tensor):
    """A tensor of the device; ``inner`` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "DeviceTensor":
        with torch.inference_mode(False):  # a view of a usual tensor is a usual one
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
                device=torch.device("npu", 0),
            )  # fmt: skip
        made.inner = inner
        HELD.add(made)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.inner})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        DEVICE.wait("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class Emulation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, tensors of the present thread that ask for "npu" are the device's."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode; keeping the compiler away would import it, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Those among arguments, which may be lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """The same, of arguments or results."""
    if isinstance(values, list | tuple):
        return type(values)([_mapped(change, value) for value in values])
    return change(values)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "npu"


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
    if kwargs.get("pin_memory"):
        return DEVICE.pin(func(*args, **{**kwargs, "pin_memory": False}))
    if func in (aten.pin_memory.default, aten._pin_memory.default):
        return DEVICE.pin(args[0].clone())
    if func is aten.is_pinned.default:
        return DEVICE.is_pinned(args[0])
    if func in _TRANSFERS and _crosses(func, args, kwargs):
        return _transfer(func, args, kwargs)
    if not _is_device(kwargs.get("device")) and not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
        return func(*args, **kwargs)
    if any(not isinstance(tensor, DeviceTensor) for tensor in tensors):
        raise MixedDevices(f"{func} of {[(tuple(t.shape), t.device.type) for t in tensors]}")
    if func in _WAITING or _hidden(func, args, kwargs):
        DEVICE.wait(func)
    DEVICE.stream.advance(len(DEVICE.stream.issued))
    return _compute(func, args, kwargs, {id(tensor.inner): tensor for tensor in tensors})  # type: ignore[attr-defined]


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any], known: dict[int, torch.Tensor]) -> Any:
    """The operation in the host's memory; ``known``: a tensor of the device by the identity of its inner one."""
    if _is_device(kwargs.get("device")):
        kwargs = {**kwargs, "device": torch.device("cpu")}

    def unwrap(leaf: Any) -> Any:
        return leaf.inner if isinstance(leaf, DeviceTensor) else leaf

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else DeviceTensor(leaf)

    named = {name: _mapped(unwrap, value) for name, value in kwargs.items()}
    return _mapped(wrap, func(*_mapped(unwrap, args), **named))


def _hidden(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the size of the result hangs on numbers that the device has."""
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return func in (aten.repeat_interleave.self_Tensor, aten.repeat_interleave.Tensor) and not kwargs.get("output_size")


def _crosses(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func is aten.copy_.default:
        return isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
    if func is aten.to.other:
        return isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
    device = args[1] if func is aten.to.device else kwargs.get("device")
    return device is not None and _is_device(device) != isinstance(args[0], DeviceTensor)


def _transfer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    non_blocking = bool(kwargs.get("non_blocking"))
    if func is aten.copy_.default:
        target, source = args[0], args[1]
        non_blocking |= len(args) > 2 and bool(args[2])
    else:
        source = args[0]
        dtype = kwargs.get("dtype") or source.dtype
        if isinstance(source, DeviceTensor):
            target = torch.empty(source.shape, dtype=dtype)
        else:
            target = DeviceTensor(torch.empty(source.shape, dtype=dtype))
    to_host = isinstance(source, DeviceTensor)
    host = target if to_host else source
    DEVICE.copies.append(("to host" if to_host else "to device", source.nbytes))
    if not (non_blocking and DEVICE.is_pinned(host)):
        DEVICE.wait(f"a copy of {host.nbytes} bytes {'from' if to_host else 'to'} the device, which is not pinned and "
                    "asynchronous")  # fmt: skip
    theirs, ours = (source.inner, target) if to_host else (source, target.inner)
    if non_blocking:
        stream = DEVICE.stream
        is_own = not to_host and bool(brought(theirs, stream))
        copy = Copy(theirs, ours, to_host, stream, len(stream.issued) + 1, theirs.clone(), is_own)
        if to_host:
            ours.view(-1).view(torch.uint8).fill_(RUBBISH)
        stream.issued.append(copy)
        DEVICE.underway.append(copy)
    else:
        DEVICE.stream.advance(len(DEVICE.stream.issued))
        ours.copy_(theirs)
    return target  # type: ignore[no-any-return]


MEMORY = SimpleNamespace(total=8 << 30)
"""What the device says that it has; what is held of it is not free."""


class _Runtime:
    """As much of ``torch.npu`` as an engine uses."""

    Stream = Stream
    Event = Event

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        assert index == 0

    def synchronize(self) -> None:
        DEVICE.waits += 1
        DEVICE.stream.advance(len(DEVICE.stream.issued))
        DEVICE.end_copies()

    def current_stream(self) -> Stream:
        return DEVICE.stream

    stream = staticmethod(on_stream)

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return MEMORY.total - HELD.bytes, MEMORY.total

    def empty_cache(self) -> None:
        pass

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="Emulated 1", total_memory=MEMORY.total, cube_core_num=4)


def install() -> None:
    """Makes it this process's ``torch.npu``, and every forward thread one that has it."""
    from tokenspeed.device import forward_thread

    _setup_privateuseone_for_python_backend(rename="npu", backend_module=_Runtime())
    loop = forward_thread.ForwardThread._loop

    def emulated_loop(self: Any) -> None:
        with Emulation():
            loop(self)

    forward_thread.ForwardThread._loop = emulated_loop  # type: ignore[method-assign]
