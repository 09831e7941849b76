"""Lengths of the rows, on the host: torch_npu's attention takes them as Python integers.

Reading a tensor of the device waits for it. All layers of a step are given the same lengths, so they are read once and
kept as long as the tensor lives and nobody has written to it.
"""

import weakref
from dataclasses import dataclass

import torch

KEPT = 8
"""How many tensors' values are remembered: lengths and starts of each cache group of a step."""


@dataclass(frozen=True)
class _Read:
    owner: "weakref.ref[torch.Tensor]"
    place: tuple[object, ...]
    values: list[int]


_reads: list[_Read] = []


def lies_on_device(values: torch.Tensor) -> bool:
    """Whether reading ``values`` waits for a device."""
    return values.device.type != "cpu"


def _place(values: torch.Tensor, owner: torch.Tensor) -> tuple[object, ...]:
    return (values.storage_offset(), values.shape, values.stride(), owner._version)


def on_host(values: torch.Tensor) -> list[int]:
    """The integers of ``values`` [n].

    A tensor of the host is read at each call, for NumPy may write to it unseen; so is one made in inference mode, which
    counts no writes. Of any other the values are kept until it is written to.
    """
    if not lies_on_device(values) or values.is_inference():
        return _listed(values)
    owner = values if values._base is None else values._base
    place = _place(values, owner)
    for read in _reads:
        if read.owner() is owner and read.place == place:
            return read.values
    found = _listed(values)
    _reads.append(_Read(weakref.ref(owner), place, found))
    del _reads[:-KEPT]
    return found


def _listed(values: torch.Tensor) -> list[int]:
    found: list[int] = values.tolist()
    return found
