"""Runs a kernel of an accelerator on the cases, whose tensors lie in the host's memory.

Each call copies the memory behind its tensors to the device, whole and with the guards around them, and all of it back
behind the call: what the kernel writes beside its outputs is found as on the host, and views keep their strides and
what they share.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel.accelerators import runtime_of
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import KernelFunction

_DEVICES = {"nvidia": "cuda", "amd": "cuda", "npu": "npu"}
"""What PyTorch calls the devices of a vendor."""


def device_of(platform: PlatformInfo) -> torch.device:
    """Where kernels of the platform find their tensors.

    The host's memory where this machine has no device of the vendor: the platform is then an overridden one, whose
    kernels an interpreter computes, or a stand-in.
    """
    kind = _DEVICES.get(platform.vendor)
    return torch.device("cpu" if kind is None or runtime_of(kind) is None else kind)


def values_on(device: torch.device, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a kernel is bound to, its tensors on the device."""
    return {name: _value_on(device, value) for name, value in values.items()}


def _value_on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return values_on(device, value)
    if isinstance(value, list | tuple):
        return type(value)(_value_on(device, part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: _value_on(device, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        )
    return value


class _Memory:
    """The host's memory behind the tensors of one call, and its copies on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def moved(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(self.moved(part) for part in argument)
        return self._tensor(argument) if isinstance(argument, torch.Tensor) else argument

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._copies:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._copies[storage.data_ptr()] = host, host.to(self._device, copy=True)
        there = self._copies[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return view.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    def bring_back(self) -> None:
        """Waits for the device, and raises what it has to say."""
        for host, there in self._copies.values():
            host.copy_(there)


def arguments_on(device: torch.device, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call with their tensors on the device; those that share memory share it there."""
    memory = _Memory(device)
    return tuple(memory.moved(argument) for argument in arguments)


def bridged(fn: KernelFunction, device: torch.device) -> KernelFunction:
    """``fn``, which wants its tensors on the device, for tensors in the host's memory."""

    def run(*arguments: Any) -> None:
        memory = _Memory(device)
        fn(*(memory.moved(argument) for argument in arguments))
        memory.bring_back()

    return run
