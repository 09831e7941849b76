"""What an operation works on when it is timed, and how much work one call is.

A workload has the shapes of a real step: one row in the phase "decode", a chunk of rows in the phase "prefill". Where
an operation has none, the largest of its numeric cases that fits serves in both phases.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS
from tokenspeed_kernel.signature import FormatSignature, TensorFormat
from tokenspeed_kernel.traits import TraitValue

logger = logging.getLogger("tokenspeed_kernel")

PHASES = ("decode", "prefill")

LARGEST_CASE_BYTES = 64 << 20
"""Numeric cases above this are there for their offsets and say nothing about speed."""


@dataclass(frozen=True)
class Work:
    """What one call cannot do without: bytes to and from memory, and arithmetic operations."""

    bytes: int
    operations: int


@dataclass(frozen=True)
class Workload:
    """One call to be timed.

    Attributes:
        description: the shapes, for people.
        arguments: of the kernel.
        bound: what the kernel is made of, for operations that bind; as ``Operation.bound`` names it.
        work: of one call; None: not known.
        cold: whether a real step finds the inputs in memory and not in the caches (weights, KV).
    """

    description: str
    arguments: tuple[Any, ...]
    bound: Mapping[str, Any] = field(default_factory=dict)
    work: Work | None = None
    cold: bool = False


Traits: TypeAlias = Mapping[str, TraitValue]
WorkFunction: TypeAlias = Callable[[FormatSignature, Traits, str], Work]
WorkloadFunction: TypeAlias = Callable[[FormatSignature, Traits, str, Mapping[str, Any] | None], Workload]


@dataclass(frozen=True)
class _Maker:
    make: WorkloadFunction
    work: WorkFunction | None


_makers: dict[str, _Maker] = {}


def register_workload(operation: str, make: WorkloadFunction, work: WorkFunction | None = None) -> None:
    """Makes ``make(signature, traits, phase, bound)`` the source of workloads for "family.mode".

    ``bound`` holds the real weights where a binding asks, else None. ``work(signature, traits, phase)`` gives the work
    of the same call without making it, for the estimate of the roofline. Raises ValueError where there is one already.
    """
    if operation in _makers:
        raise ValueError(f"{operation} has a workload already ({_makers[operation].make.__module__})")
    _makers[operation] = _Maker(make, work)


def shape_bucket(traits: Traits, phase: str) -> str:
    """The shapes that share one measurement, such as "decode causal=True head_dim=64": sizes are rounded up to powers
    of two, other traits are kept. Raises ValueError for an unknown phase."""
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r} is unknown; use one of {list(PHASES)}")
    parts = [phase]
    for name, value in sorted(traits.items()):
        is_size = type(value) is int and value > 0
        parts.append(f"{name}={1 << (int(value) - 1).bit_length() if is_size else value}")
    return " ".join(parts)


def bits_of(tensor_format: TensorFormat) -> float:
    """Bits of one element, scales included where they lie in the stored bytes."""
    name = tensor_format.format
    if name in BLOCK_BYTES:
        return 8.0 * BLOCK_BYTES[name] / BLOCK_ELEMENTS[name]
    if name in ("int4", "fp4"):
        return 4.0
    dtype: torch.dtype = getattr(torch, tensor_format.storage_dtype)
    return 8.0 * dtype.itemsize


def work_of(operation: str, signature: FormatSignature, traits: Traits, phase: str) -> Work | None:
    """The work of one call, or None where the operation declares none."""
    maker = _makers.get(operation)
    return None if maker is None or maker.work is None else maker.work(signature, traits, phase)


def workload_for(
    operation: str,
    signature: FormatSignature,
    traits: Traits,
    phase: str,
    *,
    admits: Callable[[Traits], bool],
    bound: Mapping[str, Any] | None = None,
) -> Workload | None:
    """What to time for this request, or None where nobody wrote anything that fits, or what was written failed.

    ``admits(traits)``: whether every kernel to be timed takes a numeric case with these traits. ``bound``: the real
    values of a binding, used where the operation has a workload of its own.
    """
    maker = _makers.get(operation)
    try:
        if maker is not None:
            return maker.make(signature, traits, phase, bound)
        return _from_cases(operation, signature, admits)
    except Exception as error:  # measuring is an aid: what a stranger's workload raises must not end a start
        logger.warning("no workload of %s (%s): %s: %s", operation, signature, type(error).__name__, error)
        return None


def _from_cases(operation: str, signature: FormatSignature, admits: Callable[[Traits], bool]) -> Workload | None:
    # Imported here: the numerics import the binding, which tunes.
    from tokenspeed_kernel.numerics.cases import Buffers, cases_for

    best: Workload | None = None
    largest = -1
    for case in cases_for(operation, signature, 0):
        if not admits(case.traits):
            continue
        calls: list[tuple[Any, ...]] = []
        case.call(lambda *arguments, calls=calls: calls.append(arguments), Buffers())
        if not calls:
            continue
        size = sum(t.numel() * t.element_size() for t in calls[0] if isinstance(t, torch.Tensor))
        if largest < size <= LARGEST_CASE_BYTES:
            best, largest = Workload(f"numeric case {case.name!r}", calls[0], case.bound), size
    return best
