"""Lengths of the rows, on the host: torch_npu's attention takes them as Python integers.

Reading a tensor of the device waits for it. All layers of a step are given the same lengths, so they are read once and
kept as long as the tensor lives and nobody has written to it. While a graph is captured nobody may wait: a step of one
query a row then takes the most that its page table has room for, and whoever replays the graph updates the operator's
lengths (docs/design/npu-kernels.md says to what).
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


def is_capturing() -> bool:
    """Whether what is issued now becomes part of a graph."""
    runtime = getattr(torch, "npu", None)
    return runtime is not None and bool(runtime.is_current_stream_capturing())


def of_step(seq_lens: torch.Tensor, capacity: int) -> list[int]:
    """The lengths of a step's rows; ``capacity`` for each of them while a graph is captured."""
    return [capacity] * seq_lens.shape[0] if is_capturing() else on_host(seq_lens)


def _place(values: torch.Tensor, owner: torch.Tensor) -> tuple[object, ...]:
    return (values.dtype, values.storage_offset(), values.shape, values.stride(), owner._version)


def on_host(values: torch.Tensor) -> list[int]:
    """The integers of ``values`` [n].

    A tensor of the host is read at each call, for NumPy may write to it unseen; so is one made in inference mode, which
    counts no writes. Of any other the values are kept until torch writes to it: a graph or a kernel of somebody else's
    must not be what changes them. Raises RuntimeError while a graph is captured.
    """
    if is_capturing():
        raise RuntimeError(
            "the lengths of rows with several queries, or of chunks, lie on the device and cannot be read while a "
            "graph is captured; capture steps of one query a row"
        )
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
