"""What a numeric case is: inputs, a call, and what float64 says must come out.

A case hands its tensors to the kernel through ``Buffers``, which poisons outputs, surrounds every tensor with guard
bytes, and notices inputs that were changed: a kernel that writes less, more, or elsewhere than it should is caught by
any case.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue

UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
}
"""The largest relative error of rounding to nearest."""

GUARD_BYTES = 256
_GUARD = 0xA5


@dataclass(frozen=True)
class Close:
    """The output lies within ``bound`` of ``value`` (both float64, shapes that broadcast). NaN only where value is
    NaN."""

    value: torch.Tensor
    bound: torch.Tensor


@dataclass(frozen=True)
class Exact:
    """The output has exactly these values; NaN matches NaN."""

    value: torch.Tensor


@dataclass(frozen=True)
class AnyOf:
    """Row i of the integer output [S] is one of row i of ``values`` [S, n]."""

    values: torch.Tensor


Expectation: TypeAlias = Close | Exact | AnyOf
Outputs: TypeAlias = dict[str, torch.Tensor]


@dataclass
class _Guarded:
    name: str
    storage: torch.Tensor
    view: torch.Tensor
    original: torch.Tensor | None


class Buffers:
    """Memory for one call of a kernel."""

    def __init__(self) -> None:
        self._buffers: list[_Guarded] = []

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Guarded:
        count = 1
        for extent in shape:
            count *= extent
        size = count * dtype.itemsize
        storage = torch.full((size + 2 * GUARD_BYTES,), _GUARD, dtype=torch.uint8)
        view = storage[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)
        guarded = _Guarded(name, storage, view, None)
        self._buffers.append(guarded)
        return guarded

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor full of poison: NaN, the least integer, or (bool) the bytes 0xA5."""
        view = self._allocate(name, shape, dtype).view
        if dtype.is_floating_point:
            view.fill_(torch.nan)
        elif dtype is not torch.bool:
            view.fill_(torch.iinfo(dtype).min)
        return view

    def read_only(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` that the kernel must leave alone."""
        guarded = self._allocate(name, tuple(tensor.shape), tensor.dtype)
        guarded.view.copy_(tensor)
        guarded.original = tensor.clone()
        return guarded.view

    def writable(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` that the kernel may change."""
        view = self._allocate(name, tuple(tensor.shape), tensor.dtype).view
        view.copy_(tensor)
        return view

    def violations(self) -> list[str]:
        """What the kernel wrote that it should not have; one line a tensor."""
        found = []
        for buffer in self._buffers:
            before, after = buffer.storage[:GUARD_BYTES], buffer.storage[buffer.storage.numel() - GUARD_BYTES :]
            for place, guard in (("before", before), ("beyond", after)):
                if not bool((guard == _GUARD).all()):
                    found.append(f"wrote {place} the tensor {buffer.name}")
            if buffer.original is not None and not same_bits(buffer.view, buffer.original):
                found.append(f"changed its input {buffer.name}")
        return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes (NaN equals the same NaN)."""
    left, right = (t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(left, right)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: what it tries, such as "odd sizes".
        traits: the call's traits; a kernel that does not admit them skips the case.
        call: runs the kernel on fresh buffers and returns its outputs by name.
        expect: the expectation of each output, from float64.
        bound: what the kernel is made from, for operations that bind.
        split: the same computation cut into more calls; a kernel tagged "row_invariant" must give the same bits.
    """

    name: str
    traits: Mapping[str, TraitValue]
    call: Callable[[KernelFunction, Buffers], Outputs]
    expect: Callable[[], dict[str, Expectation]]
    bound: Mapping[str, Any] = field(default_factory=dict)
    split: Callable[[KernelFunction, Buffers], Outputs] | None = None


CaseGenerator: TypeAlias = Callable[[FormatSignature, torch.Generator], Iterator[Case]]

_generators: dict[str, tuple[CaseGenerator, ...]] = {}


def register_cases(operation: str, generator: CaseGenerator, more: CaseGenerator | None = None) -> None:
    """Makes ``generator`` the source of cases for "family.mode", and ``more`` that of the slow ones, which only a full
    run takes. Raises ValueError where there is one already."""
    if operation in _generators:
        raise ValueError(f"{operation} has a case generator already ({_generators[operation][0].__module__})")
    _generators[operation] = (generator,) if more is None else (generator, more)


def cases_for(operation: str, signature: FormatSignature, seed: int, full: bool = False) -> list[Case]:
    """The cases of an operation for one signature, the slow ones where ``full``; the same ones for the same seed. Empty
    where nobody wrote any."""
    generators = _generators.get(operation, ())[: 2 if full else 1]
    return [case for generator in generators for case in generator(signature, torch.Generator().manual_seed(seed))]
